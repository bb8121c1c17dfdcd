"""The rows: every field filled, every seam whole on every release, and red when a range is not."""

import ast
import inspect
import json
import re
import shutil
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.version import Version

from harness.matrix import shapes
from kvpatch import distributions, gate, patches, supported
from kvpatch.environ import ALLOW_VLLM
from kvpatch.patch import Feature, Gap, Kind, Outcome, Patch, Seam, load
from kvpatch.versions import Installed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvpatch"
CURRENT = "0.29"  # the first release that needs nothing of any legacy.py
FEATURES = [pytest.param(feature, id=feature.name) for feature in patches.FEATURES]
PATCHES = [
    pytest.param(feature, patch, id=patch.id)
    for feature in patches.FEATURES
    for patch in feature.patches
]


def each(cases):
    """Ask a test of every case, as one test: two thousand cost more than what they ask."""

    def over(test):
        def every():
            failed = []
            for case in cases:
                try:
                    test(*case.values)
                except Exception:
                    failed.append(f"{case.id}: {traceback.format_exc(limit=-1)}")
            assert not failed, "\n".join(failed)

        every.__doc__ = test.__doc__
        return every

    return over


def seams(feature):
    return [one if isinstance(one, Seam) else Seam((one,)) for one in feature.seams]


def releases(feature):
    """The inspected releases that a feature is for, oldest first."""
    return [release for release in supported.RELEASES if Version(release) in feature.span]


def holes(feature):
    """The releases on which a seam of ``feature`` has no part, or several."""
    return [
        release
        for release in releases(feature)
        if any(len(one.at(Version(release))) != 1 for one in seams(feature))
    ]


def start(feature, release):
    """What start-up decides on a release that is validated, or named by the operator."""
    installed = Installed.release("vllm", release)
    recorded = shapes.releases("vllm")[str(supported.release_of(installed))]
    (kvcached,) = shapes.releases("kvcached").values()
    return gate.check_feature(
        feature._replace(wanted=None),
        installed,
        shapes.look(recorded, kvcached),
        {ALLOW_VLLM.name: release},
    )


@each(FEATURES)
def test_every_seam_has_one_part_on_every_release(feature):
    assert releases(feature)[-1] == supported.INSPECTED
    assert holes(feature) == []
    for release in releases(feature):
        assert set(feature.at(Version(release))) <= set(feature.patches)


@each([pytest.param(r, id=r) for r in supported.RELEASES if Version(r) >= Version("0.16")])
def test_no_release_has_a_hole_in_any_feature(release):
    assert shapes.holes(release) == []


class Part(NamedTuple):
    """One part of one seam of one feature, and the releases that it covers."""

    feature: Feature
    seam: int
    part: int
    covers: list[str]

    def but(self, **range_):
        """The feature with another range of this part."""
        every = seams(self.feature)
        parts = list(every[self.seam].parts)
        parts[self.part] = parts[self.part]._replace(**range_)
        every[self.seam] = Seam(tuple(parts))
        return self.feature._replace(seams=tuple(every))


def every_part():
    found = []
    for feature in patches.FEATURES:
        for number, one in enumerate(seams(feature)):
            for index, part in enumerate(one.parts):
                covers = [r for r in releases(feature) if Version(r) in part.span]
                name = part.id if isinstance(part, Patch) else f"{one.name} not before {part.since}"
                found.append(pytest.param(Part(feature, number, index, covers), id=name))
    return found


def after(release):
    """The next inspected release; after the newest one, a release that nobody has seen."""
    known = [*supported.RELEASES, "99"]
    return known[known.index(release) + 1]


def refused(feature, release):
    """Whatever starts on the release is refused, with the code of a hole."""
    verdict = start(feature, release)
    if feature.optional and not supported.is_validated(Installed.release("vllm", release)):
        assert verdict.outcome is Outcome.OUTSIDE  # an optional feature is off there
        return
    assert (verdict.outcome, verdict.code) == (Outcome.FAILED, "KVP203")
    refusal = gate.refusal(feature, verdict)
    assert refusal is not None
    assert f"the feature {feature.name} has a hole on this release" in str(refusal)
    assert f"vLLM {release}" in refusal.why


@each(every_part())
def test_a_part_that_is_narrowed_by_one_release_is_a_hole_there(part):
    """A forgotten range stops vLLM; it never drops a patch."""
    assert part.covers, "it is for no inspected release"
    oldest, newest = part.covers[0], part.covers[-1]
    for release, narrowed in (
        (oldest, part.but(since=after(oldest))),
        (newest, part.but(before=newest)),
    ):
        assert holes(narrowed) == [release]
        refused(narrowed, release)


@each(every_part())
def test_a_part_that_is_widened_by_one_release_overlaps_there(part):
    every = releases(part.feature)
    if part.covers[0] != every[0]:
        release = every[every.index(part.covers[0]) - 1]
        widened = part.but(since=release)
        assert holes(widened) == [release]
        refused(widened, release)
    if part.covers[-1] != every[-1]:
        release = after(part.covers[-1])
        widened = part.but(before=after(release))
        assert holes(widened) == [release]
        refused(widened, release)


def test_a_hole_names_the_seam_and_what_it_has():
    feature = next(one for one in patches.FEATURES if one.name == "fence")
    (part,) = [param.values[0] for param in every_part() if param.id == "fence.build_of_pairs"]
    assert start(part.but(before="0.24"), "0.24.0").reason == (
        "the seam fence.build has no patch for vLLM 0.24.0"
    )
    assert start(part.but(before="0.26"), "0.25.1").reason == (
        "the seam fence.build has fence.build and fence.build_of_pairs for vLLM 0.25.1"
    )
    assert start(feature, "0.24.0").passed


def test_a_release_named_by_the_operator_gets_the_rows_of_the_newest_inspected_one():
    for feature in patches.FEATURES:
        assert start(feature, "99.1").outcome is (
            Outcome.OUTSIDE if feature.optional else Outcome.APPLIED
        )


def test_the_inspected_releases_are_those_with_recorded_signatures():
    recorded = [path.name for path in shapes.DATA.glob("signatures/vllm-*.json")]
    assert sorted(recorded) == sorted(f"vllm-{release}.json" for release in supported.RELEASES)
    assert list(shapes.releases("vllm")) == list(supported.RELEASES)
    assert list(shapes.releases("kvcached")) == list(supported.KVCACHED)


def test_they_are_in_order_and_the_newest_is_known():
    versions = list(map(Version, supported.RELEASES))
    assert versions == sorted(versions)
    assert str(versions[-1]) == supported.INSPECTED
    assert set(supported.RELEASES.values()) == {supported.VALIDATED, supported.INSPECTED_ONLY}


def test_what_is_below_the_floor_is_refused_for_a_fault():
    for release in supported.RELEASES:
        fault = supported.fault_of(Installed.release("vllm", release))
        assert (fault is not None) is (Version(release) < Version(supported.FLOOR)), release


CHECK = """
from kvpatch import distributions, gate, patches, supported
from harness.matrix import axes, derive, shapes
from kvpatch.matrix import verdicts
from kvpatch.versions import Installed
new = Installed.release("vllm", "0.34.0")
assert supported.INSPECTED == "0.34.0"
assert gate.check_installed("vllm", [new], {}) is None
assert shapes.holes("0.34.0") == []
(kvcached,) = shapes.releases("kvcached").values()
found = shapes.check_rows(shapes.releases("vllm")["0.34.0"], kvcached)
assert not any(map(shapes.is_red, found.values()))
look = shapes.look(shapes.releases("vllm")["0.34.0"], kvcached)
for feature in patches.FEATURES:
    if feature.wanted is None:
        assert gate.check_feature(feature, new, look, {}).passed, feature.name
for cell in axes.cells("0.34.0"):
    assert derive.verdict(cell).kind in (  # it starts once it ran
        verdicts.Kind.UNTESTED, verdicts.Kind.INCOMPATIBLE, verdicts.Kind.NOT_VALIDATED
    )
assert derive.verdict(
    verdicts.Cell("0.34.0", "V2", "contiguous", "Offloading", "full attention")
).kind is verdicts.Kind.UNTESTED
print(len(found))
"""


def test_a_release_where_nothing_moved_is_one_line(run, tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    copied = tmp_path / "tree/kvpatch"
    shutil.copytree(PACKAGE, copied, ignore=ignored)
    for name in ("scripts/harness", "docs/results/matrix"):
        shutil.copytree(ROOT / name, copied.parent / name, ignore=ignored)
    lines = (copied / "supported.py").read_text().splitlines(keepends=True)
    (newest,) = [number for number, line in enumerate(lines) if '"0.33.0":' in line]
    lines.insert(newest + 1, '    "0.34.0": VALIDATED,\n')
    (copied / "supported.py").write_text("".join(lines))
    folder = copied.parent / "docs/results/matrix/signatures"
    recorded = json.loads((folder / "vllm-0.33.0.json").read_text())
    (folder / "vllm-0.34.0.json").write_text(json.dumps(recorded | {"version": "0.34.0"}))
    done = run(
        sys.executable,
        "-c",
        CHECK,
        PYTHONPATH=f"{copied.parent}:{copied.parent}/scripts",
        KVPATCH="0",
    )
    assert (done.code, done.err) == (0, "")
    assert int(done.out) == len(PATCHES)
    differing = [
        path
        for path in copied.rglob("*.py")
        if path.read_text() != (PACKAGE / path.relative_to(copied)).read_text()
    ]
    assert differing == [copied / "supported.py"]


def home(module):
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def parameters(reference):
    """The parameter names of the function ``module:name``, without importing it."""
    module, _, name = reference.partition(":")
    (function,) = (
        node
        for node in ast.parse(home(module).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return [argument.arg for argument in function.args.args]


def test_the_ids_are_unique():
    ids = [patch.id for feature in patches.FEATURES for patch in feature.patches]
    assert len(ids) == len(set(ids))
    names = [feature.name for feature in patches.FEATURES]
    assert len(names) == len(set(names))


@each(PATCHES)
def test_every_field_is_filled(feature, patch):
    for name in ("id", "target", "why", "upstream", "until", "wrapper", "since"):
        text = getattr(patch, name)
        assert text.strip() == text != ""
    assert patch.target.count(":") == patch.wrapper.count(":") == 1
    assert patch.before is None or Version(patch.since) < Version(patch.before)


@each(PATCHES)
def test_the_wrapper_exists_and_takes_what_it_is_given(feature, patch):
    taken = parameters(patch.wrapper)
    if patch.kind == "wrap":
        assert taken == ["wrapped", "instance", "args", "kwargs"]
    else:
        assert len(taken) == 1


def homes():
    """By feature the package or module of ``kvpatch.patches`` that its rows are in."""
    found = {}
    for path in sorted((PACKAGE / "patches").iterdir()):
        name = path.stem
        if name[0] != "_":
            module = sys.modules[f"kvpatch.patches.{name}"]
            for value in vars(module).values():
                if isinstance(value, Feature):
                    found[value.name] = module.__name__
    return found | {"host-device-sleep": "kvpatch.patches.host_device"}


def test_a_feature_its_module_and_its_ids_are_one_word_in_the_design_too():
    listed = re.findall(r"^\| `([a-z_]+)` \|", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(one.name.replace("-", "_") for one in patches.FEATURES)
    for feature in patches.FEATURES:
        word = feature.name.replace("-", "_")
        assert f"kvpatch.patches.{word}_".startswith(f"{homes()[feature.name]}_")
        assert {one.id.partition(".")[0] for one in feature.patches} == {word}


@each(PATCHES)
def test_the_wrapper_is_in_the_folder_of_its_feature(feature, patch):
    """What a feature does is in its folder; the host device's code is in ``hostdevice`` too."""
    module = patch.wrapper.partition(":")[0]
    own = homes()[feature.name]
    if feature.distribution == distributions.HOST_DISTRIBUTION and "hostdevice" in module:
        own = "kvpatch.hostdevice"
    assert module == own or module.startswith(f"{own}.")


@each(PATCHES)
def test_code_for_releases_that_ended_is_in_legacy(feature, patch):
    """It can be deleted with the releases before ``CURRENT``: no row of a later one uses it."""
    module = patch.wrapper.partition(":")[0]
    if module.endswith((".legacy", ".fixes")):
        assert patch.before is not None, f"{patch.id} holds on, and its code is in {module}"
        in_legacy = Version(patch.before) <= Version(CURRENT)
        assert module.endswith(".legacy") is in_legacy, patch.id


@each(FEATURES)
def test_features(feature):
    assert feature.summary
    assert feature.patches
    assert Version(feature.since) >= Version(supported.FLOOR)
    taken = {feature.wanted: [], feature.requires: ["facts"], feature.prepare: []}
    assert all(parameters(one) == names for one, names in taken.items() if one is not None)
    for one in seams(feature):
        for part in one.parts:
            assert isinstance(part, Patch | Gap)
            if isinstance(part, Gap):
                assert part.why.strip() == part.why != ""
                assert "TODO" not in part.why


def replaced_functions():
    """Each row that puts a function in a function's place, with each release that it is for."""
    return [
        pytest.param(patch, release, id=f"{patch.id}-{release}")
        for feature in patches.FEATURES
        for patch in feature.patches
        if patch.kind is Kind.REPLACE and patch.parameters
        for release in releases(feature)
        if Version(release) in patch.span
    ]


@each(replaced_functions())
def test_a_replacement_takes_every_parameter_of_its_target(patch, release):
    """The gate asks for the parameters that a row names; one more would end an engine's step."""
    (kvcached,) = shapes.releases("kvcached").values()
    recorded = shapes.releases("vllm")[release].targets.get(patch.target)
    recorded = recorded or kvcached.targets[patch.target]
    (target,) = ast.parse(f"def target{recorded}: ...").body
    assert isinstance(target, ast.FunctionDef)
    taken = inspect.signature(load(patch.wrapper)(lambda: None)).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    arguments = target.args
    wanted = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    assert wanted == list(taken)[: len(wanted)]
