"""The recorded runs: they name the code they ran on, and are stale when it is another one."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from harness.matrix import command, record
from kvpatch import patches, supported
from kvpatch.matrix import evidence, signatures
from kvpatch.matrix.axes import Cell

ROOT = Path(__file__).parents[2]
AXES = {
    "runner": "V2",
    "layout": "contiguous",
    "connector": "Offloading",
    "model": "full attention",
}


def in_force(release: str, on_host: bool = True) -> tuple[str, ...]:
    """The ids of the patches that an engine of a release has today.

    On the host device, as recorded runs are, or on a GPU; nobody asks for the debug mode.
    """
    wanted = {"host-device", "host-copies", "sleep-on-host"} if on_host else set()
    return tuple(
        patch.id
        for feature in patches.FEATURES
        if Version(release) in feature.span and (feature.wanted is None or feature.name in wanted)
        for patch in feature.at(Version(release))
    )


def by_target(ids: Iterable[str]) -> dict[str, list[str]]:
    targets = {one.id: one.target for feature in patches.FEATURES for one in feature.patches}
    found: dict[str, list[str]] = {}
    for patch_id in ids:
        found.setdefault(targets.get(patch_id, "none of today's"), []).append(patch_id)
    return found


def of_other_patches(data: Path) -> list[str]:
    """The recorded codes with patches that are not today's, or in another order on an object."""
    found = []
    for folder in evidence.FOLDERS:
        for path in sorted((data / folder).glob("*.json")):
            result = json.loads(path.read_text())
            today = by_target(in_force(result["vllm"]))
            for key, code in result.get("code", {}).items():
                then = by_target(code["patches"])
                left = {target: iter(ids) for target, ids in today.items()}
                if not all(one in left.get(target, ()) for target in then for one in then[target]):
                    found.append(f"{folder}/{path.name} {key}")
    return found


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    """Record one run of 0.32.0, on the code of today unless a test says another."""

    def data(**changes: Any) -> Path:
        ids = in_force("0.32.0")
        code = {"commit": "abc", "patches": ids, "digests": evidence.digests_of(ids)} | changes
        run = AXES | {"right": True, "code": "abc"}
        folder = tmp_path / "data/engine"
        folder.mkdir(parents=True, exist_ok=True)
        result = {"vllm": "0.32.0", "kvcached": "0.1.6", "runs": [run], "code": {"abc": code}}
        (folder / "vllm-0.32.0-kvcached-0.1.6.json").write_text(json.dumps(result))
        evidence.forget()
        return folder.parent

    return data


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    evidence.forget()
    yield
    evidence.forget()


# Which patches were in force


def test_the_recorded_ids_are_those_of_rows_of_today():
    """Otherwise a row went or was renamed: run the cells of that release again."""
    assert of_other_patches(signatures.DATA) == []


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="a digest is of the syntax tree of Python 3.11"
)
def test_every_row_of_today_was_in_force_where_a_cell_stands():
    """Otherwise a row came: scripts/matrix engine --stale --feature none."""
    every = {patch.id for feature in patches.FEATURES for patch in feature.patches}
    stale = [(cell, every & set(changed)) for _, cell, changed in evidence.stale()]
    assert [(cell, rows) for cell, rows in stale if rows] == []


def test_other_ids_than_those_of_today_are_found(data):
    assert of_other_patches(data()) == []
    ids = in_force("0.32.0")
    assert of_other_patches(data(patches=ids[:-1])) == []  # one came since
    for other in ((*ids, "a.new_patch"), ids[::-1]):
        assert of_other_patches(data(patches=other)) == [
            "engine/vllm-0.32.0-kvcached-0.1.6.json abc"
        ]


def test_a_gpu_has_no_patches_of_the_host_device(data):
    ids = in_force("0.32.0", on_host=False)
    assert not any(one.startswith("host.") for one in ids)
    assert of_other_patches(data(patches=ids)) == []


# Stale runs


def test_a_run_on_the_code_of_today_is_not_stale(data):
    folder = data()
    ((cell, (run,)),) = evidence.runs(folder).items()
    assert cell == Cell(vllm="0.32.0", **AXES)
    assert (run.level, run.right, run.code.commit) == ("engine", True, "abc")
    assert list(evidence.stale(folder)) == []


def test_a_run_on_another_module_is_stale(data):
    digests = evidence.digests_of(in_force("0.32.0"))
    changed = digests | {"kvpatch.patches.fence.hooks": "another"}
    gone = digests | {"kvpatch.patches.fence.gone": "1"}
    for other, module in ((changed, "hooks"), (gone, "gone")):
        ((_, _, modules),) = evidence.stale(data(digests=other))
        assert modules == [f"kvpatch.patches.fence.{module}"]
    moved = digests | {"kvpatch.patches.sleep.weights": "as it was"}
    assert list(evidence.stale(data(digests=moved))) == []
    del digests["kvpatch.patches.fence.fence"]  # not there when it ran
    ((_, _, modules),) = evidence.stale(data(digests=digests))
    assert modules == ["kvpatch.patches.fence.fence"]


def test_the_code_of_tiers_says_nothing_of_a_run_without_them(data):
    ids = in_force("0.32.0")
    digests = evidence.digests_of(ids) | {"kvpatch.patches.secondary_tiers.fs": "another"}
    assert list(evidence.stale(data(digests=digests))) == []
    kept = tuple(one for one in ids if one != "tiers.file_mapper")
    folder = data(patches=kept, digests=digests)
    assert list(evidence.stale(folder)) == []
    path = folder / "engine/vllm-0.32.0-kvcached-0.1.6.json"
    path.write_text(path.read_text().replace('"Offloading"', '"tiering fs"'))
    evidence.forget()
    ((_, _, changed),) = evidence.stale(folder)
    assert changed == ["kvpatch.patches.secondary_tiers.fs", "tiers.file_mapper"]


def test_a_run_without_a_row_of_today_or_with_another_is_stale(data):
    ids = in_force("0.32.0")
    kept = tuple(one for one in ids if one != "fence.build")
    for other, row in ((kept, "fence.build"), ((*ids, "fence.gone"), "fence.gone")):
        folder = data(patches=other, digests=evidence.digests_of(other))
        ((_, _, changed),) = evidence.stale(folder)
        assert changed == [row]


def test_a_run_without_a_row_stands_where_another_of_its_kind_had_it(data):
    """Of the same release, runner, layout and connector; on the code of today, and right."""
    ids = in_force("0.32.0")
    kept = tuple(one for one in ids if one != "fence.build")
    folder = data(patches=kept, digests=evidence.digests_of(kept))
    path = folder / "engine/vllm-0.32.0-kvcached-0.1.6.json"
    whole = {"commit": "def", "patches": ids, "digests": evidence.digests_of(ids)}

    def stale_beside(**changes: Any) -> int:
        result = json.loads(path.read_text())
        other = AXES | {"model": "sliding window", "right": True, "code": "def"} | changes
        result["runs"] = [result["runs"][0], other]
        result["code"]["def"] = whole
        path.write_text(json.dumps(result))
        evidence.forget()
        return len(list(evidence.stale(folder)))

    assert stale_beside() == 0
    assert stale_beside(feature="fp8") == 0
    assert stale_beside(right=False) == 1
    for axis, value in (("runner", "V1"), ("layout", "non-contiguous"), ("connector", "Multi")):
        assert stale_beside(**{axis: value}) == 1
    whole["digests"] = whole["digests"] | {"kvpatch.patches.fence.hooks": "another"}
    assert stale_beside() == 2


def test_the_rows_of_a_feature_that_was_not_in_force_are_no_change(data):
    ids = in_force("0.32.0", on_host=False)
    assert list(evidence.stale(data(patches=ids, digests=evidence.digests_of(ids)))) == []


def test_a_run_whose_code_was_not_recorded_is_stale(data):
    folder = data()
    path = folder / "engine/vllm-0.32.0-kvcached-0.1.6.json"
    result = json.loads(path.read_text())
    del result["code"]
    path.write_text(json.dumps(result))
    evidence.forget()
    ((_, cell, why),) = evidence.stale(folder)
    assert cell.vllm == "0.32.0"
    assert why == ["the code was not recorded"]


def test_a_level_does_not_speak_for_another(data, monkeypatch):
    folder = data(digests={})
    (folder / "engine").rename(folder / "synchronous")
    evidence.forget()
    ((level, cell, _),) = evidence.stale(folder)
    assert level == "synchronous"
    monkeypatch.setattr(evidence, "runs", partial(evidence.runs, folder))
    names = ("connector", "model", "feature", "layout", "runner", "releases")
    selected = Namespace(**{name: [] for name in names}, missing=True, stale=False)
    for synchronous, stale, wanted in (
        (True, {(level, cell)}, True),
        (True, {("engine", cell)}, False),
        (False, set(), True),  # asynchronously it never ran
    ):
        selected.synchronous = synchronous
        assert command.wanted_cell(cell, selected, stale) is wanted
    selected.missing, selected.stale = False, True
    for synchronous, stale in ((True, {(level, cell)}), (False, set())):
        selected.synchronous = synchronous
        assert command.wanted_cell(cell, selected, stale) is bool(stale)


def test_only_engines_are_stale(data, tmp_path):
    folder = data(digests={})
    (folder / "engine").rename(folder / "bytes")
    evidence.forget()
    assert [run.level for every in evidence.runs(folder).values() for run in every] == ["bytes"]
    assert list(evidence.stale(folder)) == []


# Features


def test_a_run_with_a_feature_is_an_engine_run_of_a_cell_of_its_own(data):
    folder = data()
    path = folder / "engine/vllm-0.32.0-kvcached-0.1.6.json"
    result = json.loads(path.read_text())
    result["runs"][0]["feature"] = "fp8"
    (folder / evidence.FEATURES).mkdir()
    (folder / evidence.FEATURES / path.name).write_text(json.dumps(result))
    evidence.forget()
    found = evidence.runs(folder)
    assert list(found) == [Cell(vllm="0.32.0", **AXES), Cell(vllm="0.32.0", **AXES, feature="fp8")]
    files = [(run.level, run.file.partition("/")[0]) for every in found.values() for run in every]
    assert files == [("engine", "engine"), ("engine", "features")]


@pytest.mark.parametrize(
    ("level", "feature", "folder"),
    [
        ("engine", {}, "engine"),
        ("engine", {"feature": "fp8"}, "features"),
        ("synchronous", {"feature": "fp8"}, "synchronous"),
    ],
)
def test_a_feature_is_recorded_apart(data, monkeypatch, level, feature, folder):
    """The runs of a cell with it and without it are two, whatever the order."""
    root = data()
    monkeypatch.setattr(record, "DATA", root)
    head = {"vllm": "0.32.0", "kvcached": "0.1.6"}
    for right in (False, True):
        record.record_run(level, head, AXES | feature | {"right": right}, ["fence.build"])
    record.record_run(level, head, AXES | {"model": "hybrid", "right": True}, ["fence.build"])
    path = root / folder / "vllm-0.32.0-kvcached-0.1.6.json"
    runs = json.loads(path.read_text())["runs"]
    mine = [run for run in runs if run["model"] == AXES["model"]]
    assert [(run.get("feature"), run["right"]) for run in mine] == [(feature.get("feature"), True)]


# Digests


def test_every_wrapper_has_a_digest_on_every_release():
    for release in supported.validated():
        ids = in_force(release)
        modules = evidence.digests_of(ids)
        wrappers = {
            patch.wrapper.partition(":")[0]
            for feature in patches.FEATURES
            for patch in feature.patches
            if patch.id in ids
        }
        assert wrappers <= set(modules)
        assert evidence.HEADERS in modules


def test_a_digest_covers_what_a_wrapper_imports_and_nothing_else():
    modules = set(evidence.digests_of(["fence.build"]))
    assert modules >= {
        "kvpatch.patches.fence.hooks",
        "kvpatch.patches.fence.fence",
        "kvpatch.upstream.kvcached_api",
        "kvpatch.state",
    }
    assert not any("simple_offload" in module or "hostdevice" in module for module in modules)


def test_an_id_that_is_gone_has_no_digest():
    assert evidence.digests_of(["gone.patch"]) == {}


@pytest.fixture
def digests(run, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The digests of ``fence.build`` in a copy, after one module was edited."""
    copied = tmp_path / "tree/kvpatch"
    shutil.copytree(ROOT / "kvpatch", copied, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import json; from kvpatch.matrix import evidence\n"
    code += "print(json.dumps(evidence.digests_of(['fence.build'])))"

    def digests(module: str = "", old: str = "", new: str = "") -> dict[str, str]:
        path = copied / module
        before = path.read_text() if module else ""
        if module:
            assert old in before
            path.write_text(before.replace(old, new))
        done = run(sys.executable, "-B", "-c", code, PYTHONPATH=copied.parent, KVPATCH="0")
        if module:
            path.write_text(before)
        assert done.code == 0, done.err
        found: dict[str, str] = json.loads(done.out)
        return found

    return digests


@pytest.mark.parametrize(
    ("module", "old", "new", "changed"),
    [
        (
            "patches/fence/hooks.py",
            "    meta = wrapped(*args, **kwargs)\n    fenced",
            "    meta = wrapped(*args)\n    fenced",
            ["kvpatch.patches.fence.hooks"],
        ),
        (  # imported by it
            "patches/fence/fence.py",
            "self._builds += 1",
            "self._builds += 2",
            ["kvpatch.patches.fence.fence"],
        ),
        (  # imported by what it imports
            "environ.py",
            "is_on",
            "switched_on",
            [],  # no code of a patch
        ),
        (
            "upstream/connectors.py",
            'getattr(connector, "_connectors", None)',
            'getattr(connector, "connectors", None)',
            ["kvpatch.upstream.connectors"],
        ),
        (
            "patches/fence/hooks.py",
            '"""The fence between ',
            '"""Between ',
            [],
        ),
        (
            "patches/fence/fence.py",
            "        self._builds += 1",
            "        # Counted for the longest hold.\n        self._builds += 1",
            [],
        ),
    ],
    ids=["the wrapper", "an import", "no code of a patch", "upstream", "a docstring", "a comment"],
)
def test_a_digest_changes_with_the_code_and_not_with_its_words(digests, module, old, new, changed):
    before, after = digests(), digests(module, old, new)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == changed
