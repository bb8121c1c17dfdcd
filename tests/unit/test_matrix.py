"""The compatibility matrix: complete, current, and red when something is not as it says."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvpatch import registry
from kvpatch.matrix import axes, shapes, verdicts
from kvpatch.patch import Outcome
from kvpatch.registry import faults
from matrix_lib import record
from matrix_lib.sources import Source

ROOT = Path(__file__).parents[2]
RELEASES = ("vllm-0.28.0", "kvcached-0.1.6")
PLANNER = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"


def materialize(made: shapes.Shapes, folder: Path) -> None:
    """Write sources that have exactly the recorded targets."""
    modules: dict[str, dict[str, list[str]]] = {}
    for target, said in made.targets.items():
        module, _, path = target.partition(":")
        if module.startswith(f"{made.package}.") and said is not None:
            owner, _, name = path.rpartition(".")
            modules.setdefault(module, {}).setdefault(owner, []).append(definition(name, said))
        elif said is not None:  # added to a class of vLLM's
            patches = modules.setdefault("kvcached.integration.vllm.patches", {})
            name = path.rpartition(".")[2]
            lines = f"def patch():\n    {definition(name, said)}\n    {path} = {name}"
            patches.setdefault("", []).append(lines)
    for module, owners in modules.items():
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        classes = [
            "\n".join([f"class {owner}:", *(f"    {line}" for line in lines)])
            for owner, lines in owners.items()
            if owner
        ]
        bare = [line for line in owners.get("", []) if not is_class(line, owners)]
        path.write_text("\n".join([*classes, *bare, ""]))


def definition(name: str, said: str) -> str:
    return {"class": f"class {name}: pass", "value": f"{name} = 1"}.get(
        said, f"def {name}{said}: ..."
    )


def is_class(line: str, owners: dict[str, list[str]]) -> bool:
    return line.startswith("class ") and line.split(":")[0].removeprefix("class ") in owners


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[[str], Source]:
    """Unpacked releases: sources with the targets that are recorded of them."""

    def unpacked(name: str) -> Source:
        package, _, version = name.partition("-")
        folder = tmp_path / "cache/releases" / name
        if not folder.exists():
            made = shapes.releases(package)[version]
            materialize(made, folder)
            origin = {"archive": made.archive, "sha256": made.sha256}
            (folder / "source.json").write_text(json.dumps(origin))
        return Source(package, version, folder, "", "")

    return unpacked


def edit(source: Source, path: str, old: str, new: str) -> None:
    file = source.folder / path
    text = file.read_text()
    assert re.search(old, text)
    file.write_text(re.sub(old, new, text))


def rows_of(vllm: Source, kvcached: Source) -> dict[str, Any]:
    return shapes.check_rows(record.read_shapes(vllm), record.read_shapes(kvcached))


def rows_on(name: str, release: str) -> set[str]:
    """The rows for a release that patch a target of that name."""
    return {
        patch.id
        for feature in registry.FEATURES
        for patch in feature.patches
        if patch.target.endswith(name) and SpecifierSet(patch.vllm).contains(release)
    }


def red(found: dict[str, Any]) -> dict[str, Any]:
    return {row: verdict.outcome for row, verdict in found.items() if shapes.is_red(verdict)}


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the range of one row, as somebody would in the registry."""

    def widened(row: str, vllm: str) -> None:
        features = [
            replace(
                feature,
                patches=tuple(
                    replace(patch, vllm=vllm) if patch.id == row else patch
                    for patch in feature.patches
                ),
            )
            for feature in registry.FEATURES
        ]
        monkeypatch.setattr(registry, "FEATURES", tuple(features))

    return widened


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    verdicts.forget()
    yield
    verdicts.forget()


@pytest.fixture(scope="module")
def found() -> dict[axes.Cell, verdicts.Verdict]:
    return verdicts.verdicts()


def test_every_release_has_all_its_cells(found):
    releases = list(shapes.releases("vllm"))
    assert (releases[0], releases[-1]) == ("0.12.0", "0.33.0")
    assert list(shapes.releases("kvcached")) == ["0.1.4", "0.1.5", "0.1.6"]
    assert len(found) == len(releases) * 3 * 2 * 2 * len(axes.CONNECTORS) * len(axes.MODELS)


def test_no_cell_starts_untested_and_none_got_worse(found):
    assert [cell for cell, verdict in found.items() if verdict.kind.red] == []
    assert verdicts.lost(found) == []
    assert any(verdict.kind is verdicts.Kind.RIGHT_ENGINE for verdict in found.values())


def test_every_target_of_the_registry_is_recorded_of_every_release():
    """Otherwise the results are older than the registry: run scripts/matrix shapes."""
    for package in shapes.PACKAGES:
        wanted = {target for target in shapes.targets() if target.startswith(f"{package}.")}
        for made in shapes.releases(package).values():
            assert wanted <= set(made.targets), f"{package} {made.version}"


def test_no_row_has_a_range_in_which_its_target_is_not_there():
    for kvcached in shapes.releases("kvcached").values():
        for vllm in shapes.releases("vllm").values():
            assert red(shapes.check_rows(vllm, kvcached)) == {}, vllm.version


def test_sources_are_read_as_they_are_recorded(unpacked):
    for name in RELEASES:
        made = record.read_shapes(unpacked(name))
        recorded = shapes.releases(made.package)[made.version]
        assert made.targets == recorded.targets


def test_a_release_as_it_is_has_no_red_row(unpacked):
    found = rows_of(*map(unpacked, RELEASES))
    assert red(found) == {}
    assert found["fence.build"].outcome is Outcome.APPLIED


def test_a_target_that_is_removed_turns_its_row_red(unpacked):
    vllm, kvcached = map(unpacked, RELEASES)
    edit(vllm, PLANNER, "def build_connector_meta", "def build_metadata")
    found = red(rows_of(vllm, kvcached))
    assert found["fence.build"] is Outcome.ABSENT
    assert set(found) == rows_on("OffloadingConnectorScheduler.build_connector_meta", "0.28.0")


def test_a_parameter_that_is_renamed_turns_its_row_red(unpacked):
    vllm, kvcached = map(unpacked, RELEASES)
    edit(vllm, PLANNER, r"\bconnector_output\b", "output")
    found = rows_of(vllm, kvcached)
    assert red(found) == {"fence.worker_output": Outcome.MOVED}
    assert found["fence.worker_output"].reason.endswith("no longer takes connector_output")


def test_what_kvcached_no_longer_adds_turns_its_row_red(unpacked):
    vllm, kvcached = map(unpacked, RELEASES)
    patches = "kvcached/integration/vllm/patches.py"
    edit(kvcached, patches, "EngineCore._kvcached_install_ordered_unmap =", "install =")
    assert red(rows_of(vllm, kvcached)) == {"fence.install": Outcome.ABSENT}


def test_a_row_whose_range_is_widened_turns_red(widened):
    row = "offloading.use_uniform_kv_cache"
    kvcached = shapes.releases("kvcached")["0.1.6"]
    later = shapes.releases("vllm")["0.29.0"]
    assert shapes.check_rows(later, kvcached)[row].outcome is Outcome.NOT_NEEDED
    widened(row, ">=0.12,<0.34")
    assert red(shapes.check_rows(later, kvcached)) == {row: Outcome.ABSENT}


@pytest.mark.parametrize(
    ("name", "range_"), [("VLLM_RANGE", ">=0.12,<0.34"), ("KVCACHED_RANGE", ">=0.1.4,<=0.1.6")]
)
def test_a_tested_range_that_is_widened_turns_cells_red(monkeypatch, name, range_):
    monkeypatch.setattr(registry, name, range_)
    features = [
        replace(feature, **{name.partition("_")[0].lower(): range_})
        for feature in registry.FEATURES
    ]
    monkeypatch.setattr(registry, "FEATURES", tuple(features))
    found = verdicts.verdicts().values()
    assert any(verdict.kind is verdicts.Kind.UNTESTED for verdict in found)


def test_a_cell_that_was_right_and_is_refused_got_worse(monkeypatch):
    monkeypatch.setattr(registry, "VLLM_RANGE", "==0.11.0")
    worse = verdicts.lost(verdicts.verdicts("0.28.0"))
    assert {cell.vllm for cell in worse} >= {"0.28.0"}


@pytest.mark.parametrize(
    "fault", [fault for fault in faults.FAULTS if fault.target], ids=lambda fault: fault.vllm
)
def test_a_fault_is_where_it_is_said_to_be(fault):
    """A release that has the fault lacks what fixed it, and the later ones have it."""
    for version, made in shapes.releases("vllm").items():
        said = made.targets[fault.target]
        has_it = said is not None and (
            not fault.parameter or fault.parameter in shapes.parameters(said)
        )
        assert has_it is (Version(version) >= Version(fault.fixed)), version


def test_a_release_with_a_fault_of_its_own_is_refused_for_it(found):
    def sentence(version: str) -> str:
        cell = axes.Cell(version, "0.1.6", "V1", "contiguous", "Offloading", "full attention")
        return found[cell].why

    assert "because its OffloadingConnector gives the blocks" in sentence("0.13.0")
    assert "it requires torch 2.9" in sentence("0.14.1")
    assert "frees the blocks of an aborted request" in sentence("0.15.1")
    assert "no engine on it was compared" in sentence("0.17.0")


def test_a_refused_cell_has_the_sentence_of_the_gates(found):
    sentences = {
        verdict.why for cell, verdict in found.items() if verdict.kind is verdicts.Kind.REFUSED
    }
    assert all(sentence.startswith("kvpatch refuses to start vLLM: ") for sentence in sentences)
    (old,) = (
        verdict
        for cell, verdict in found.items()
        if cell == axes.Cell("0.28.0", "0.1.5", "V1", "contiguous", "Offloading", "full attention")
    )
    assert old.why == (
        "kvpatch refuses to start vLLM: kvcached 0.1.5 is outside the tested range, because "
        "no engine on it was compared with plain vLLM's in full; install kvcached 0.1.6 or set "
        "KVPATCH=0. [KVP107]"
    )


def test_what_a_release_does_not_have_is_absent(found):
    cell = axes.Cell("0.18.1", "0.1.6", "V1", "contiguous", "Simple eager", "full attention")
    assert found[cell].kind is verdicts.Kind.ABSENT
    assert found[cell].why == "vLLM 0.18.1 has no SimpleCPUOffloadConnector"


def test_what_an_operator_allows_by_name_does_not_change_the_matrix(monkeypatch, found):
    monkeypatch.setenv("KVPATCH_ALLOW_VLLM", "0.12.0")
    assert verdicts.verdicts("0.12.0") == {
        cell: verdict for cell, verdict in found.items() if cell.vllm == "0.12.0"
    }


def test_a_release_outside_the_range_can_be_tried():
    """What scripts/matrix runs on it is what would start if the operator named it."""

    def sentence(runner: str, tried: bool) -> str | None:
        cell = axes.Cell("0.33.0", "0.1.6", runner, "contiguous", "Offloading", "full attention")
        return verdicts.refusal(cell, tried)

    assert "[KVP107]" in sentence("V2", tried=False)
    assert sentence("V2", tried=True) is None
    assert "[KVP301]" in sentence("V1", tried=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what scripts/matrix reads and writes."""
    folder = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("kvpatch", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in (folder / "kvpatch/matrix/data").glob("*/*.json"):
        if not path.name.startswith(RELEASES):
            path.unlink()
    return folder


def path_of(checkout: Path) -> str:
    """Where Python finds the copy, before what is installed in place."""
    return f"{checkout}:{checkout / 'scripts'}"


@pytest.fixture
def matrix(run, checkout: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Run scripts/matrix of the copy on the unpacked releases."""
    environment = {"KVPATCH_CACHE": tmp_path / "cache", "PYTHONPATH": path_of(checkout)}

    def matrix(*arguments: str) -> Any:
        return run(sys.executable, checkout / "scripts/matrix", *arguments, **environment)

    yield matrix


def test_the_script_ends_1_when_a_row_is_red(matrix, unpacked):
    vllm, _ = map(unpacked, RELEASES)
    done = matrix("shapes", "0.28.0")
    assert done.err == ""
    assert "RED vllm" not in done.out
    edit(vllm, PLANNER, "def build_connector_meta", "def build_metadata")
    done = matrix("shapes", "0.28.0")
    assert done.code == 1
    assert "RED vllm 0.28.0, fence.build: " in done.out


def test_the_command_prints_what_is_recorded(run):
    done = run(sys.executable, "-m", "kvpatch", "matrix", "--json", PYTHONPATH=ROOT)
    assert (done.code, done.err) == (0, "")
    told = json.loads(done.out)
    assert sum(told["counts"].values()) == len(told["cells"])
    done = run(sys.executable, "-m", "kvpatch", "matrix", "--vllm", "0.28.0", PYTHONPATH=ROOT)
    assert "right (engine): engine/vllm-0.28.0-kvcached-0.1.6.json" in done.out
    done = run(sys.executable, "-m", "kvpatch", "matrix", "--vllm", "0.1.0", PYTHONPATH=ROOT)
    assert (done.code, done.out.startswith("vLLM 0.1.0 is not one of 0.12.0, ")) == (2, True)


@pytest.fixture
def new_vllm(run, checkout: Path, tmp_path: Path, unpacked) -> Callable[[str], Any]:
    """Run scripts/new-vllm on an unpacked copy of 0.28.0 under a later number."""
    source = unpacked("vllm-0.28.0")

    def new_vllm(version: str) -> Any:
        shutil.copytree(source.folder, source.folder.with_name(f"vllm-{version}"))
        command = (sys.executable, checkout / "scripts/new-vllm", version)
        environment = {"KVPATCH_CACHE": tmp_path / "cache", "PYTHONPATH": path_of(checkout)}
        return run(*command, **environment)

    return new_vllm


def test_a_new_release_that_moved_nothing(new_vllm, checkout):
    done = new_vllm("0.28.9")
    assert (done.code, done.err) == (0, "")
    assert "against 0.28.0" in done.out
    assert "\n0 rows moved, " in done.out
    assert (checkout / "kvpatch/matrix/data/shapes/vllm-0.28.9.json").exists()


def test_a_new_release_shows_both_signatures_of_what_moved(new_vllm, unpacked):
    edit(unpacked("vllm-0.28.0"), PLANNER, r"\bconnector_output\b", "output")
    done = new_vllm("0.28.9")
    assert done.code == 1
    assert "fence.worker_output: MOVED\n" in done.out
    assert "    0.28.0  (self, connector_output: KVConnectorOutput)\n" in done.out
    assert "    0.28.9  (self, output: KVConnectorOutput)\n" in done.out
    assert "scripts/matrix engine 0.28.9" in done.out
