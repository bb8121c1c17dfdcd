"""The compatibility matrix: complete, current, and red when something is not as it says."""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from harness.matrix import axes, derive, plain, recorded, shapes
from kvpatch import patches, supported
from kvpatch.cli import matrix as cli
from kvpatch.matrix import tables, verdicts
from kvpatch.matrix.verdicts import CONNECTORS, NONE, Cell, Kind, Verdict, counts
from kvpatch.patch import Outcome, Seam
from kvpatch.refusal import CODES, Basis

ROOT = Path(__file__).parents[2]
VLLM = shapes.releases("vllm")
(KVCACHED,) = shapes.releases("kvcached").values()
BUILD = (
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:"
    "OffloadingConnectorScheduler.build_connector_meta"
)


def red(vllm, kvcached=KVCACHED):
    found = shapes.check_rows(vllm, kvcached)
    return {row: one.outcome for row, one in found.items() if shapes.is_red(one)}


def but(recorded, target, signature):
    """A release in which one target is something else."""
    assert recorded.targets[target] is not None
    return replace(recorded, targets=recorded.targets | {target: signature})


def rows_on(target, release):
    return {
        patch.id
        for feature in patches.FEATURES
        for patch in feature.patches
        if patch.target == target and Version(release) in patch.span
    }


@pytest.fixture
def changed(monkeypatch):
    """Replace the range of one row, as somebody would in its file."""

    def changed(row, **range_):
        def of(feature):
            seams = tuple(
                Seam(
                    tuple(
                        part._replace(**range_) if getattr(part, "id", "") == row else part
                        for part in (one.parts if isinstance(one, Seam) else (one,))
                    )
                )
                for one in feature.seams
            )
            return feature._replace(seams=seams)

        monkeypatch.setattr(patches, "FEATURES", tuple(map(of, patches.FEATURES)))

    return changed


@pytest.fixture
def status(monkeypatch):
    """Give a release another status, as somebody would in ``supported``."""

    def status(release, value):
        monkeypatch.setattr(supported, "RELEASES", supported.RELEASES | {release: value})

    return status


@pytest.fixture(autouse=True)
def nothing_remembered():
    derive.forget()
    yield
    derive.forget()


@pytest.fixture(scope="module")
def found():
    return derive.verdicts()


def cell(vllm, connector="Offloading", runner="V1", feature=NONE):
    return Cell(vllm, runner, "contiguous", connector, "full attention", feature)


def test_every_release_has_all_its_cells(found):
    since = {one.name: Version(one.since) for one in axes.MODELS}
    kinds = sum(
        len(one.connectors)
        for release in supported.RELEASES
        for one in axes.FEATURES
        for model in one.models
        if Version(release) >= max(Version(one.since), since[model])
    )
    assert len(found) == 2 * 2 * kinds
    assert {one.vllm for one in found} == set(supported.RELEASES)


def test_no_cell_starts_untested_and_none_got_worse(found):
    assert [cell for cell, verdict in found.items() if verdict.kind.red] == []
    assert derive.lost(found) == []
    assert any(verdict.kind is Kind.VALIDATED for verdict in found.values())


def test_the_axes_hold_nothing_that_can_never_start(found):
    """Each value of each axis is in a cell that is validated; a feature may wait for its runs."""
    validated = [one for one, verdict in found.items() if verdict.kind is Kind.VALIDATED]
    for axis in ("runner", "layout", "connector", "model"):
        assert {getattr(one, axis) for one in validated} == {getattr(one, axis) for one in found}


def test_every_target_of_a_row_is_recorded_of_every_release():
    """Otherwise the results are older than the rows: run scripts/matrix signatures."""
    for package in shapes.PACKAGES:
        wanted = {target for target in shapes.targets() if target.startswith(f"{package}.")}
        for made in shapes.releases(package).values():
            assert wanted <= set(made.targets), f"{package} {made.version}"


@pytest.mark.parametrize("release", VLLM)
def test_no_row_has_a_range_in_which_its_target_is_not_there(release):
    assert red(VLLM[release]) == {}


def test_a_row_that_applies_is_told_from_others(status):
    found = shapes.check_rows(VLLM["0.32.0"], KVCACHED)
    assert found["fence.build"].outcome is Outcome.APPLIED
    assert found["fence.build_of_pairs"].outcome is Outcome.NOT_NEEDED
    status("0.31.0", supported.INSPECTED_ONLY)
    found = shapes.check_rows(VLLM["0.31.0"], KVCACHED)
    assert found["fence.build"].outcome is Outcome.OUTSIDE  # inspected, and not validated


def test_a_target_that_is_removed_turns_its_rows_red():
    found = red(but(VLLM["0.28.0"], BUILD, None))
    assert found == dict.fromkeys(rows_on(BUILD, "0.28.0"), Outcome.ABSENT)
    assert "fence.build" in found


def test_a_parameter_that_is_renamed_turns_its_row_red():
    target = BUILD.replace("build_connector_meta", "update_connector_output")
    vllm = but(VLLM["0.28.0"], target, "(self, output: KVConnectorOutput)")
    found = red(vllm)
    assert found == dict.fromkeys(rows_on(target, "0.28.0"), Outcome.MOVED)
    assert "fence.worker_output" in found
    verdict = shapes.check_rows(vllm, KVCACHED)["fence.worker_output"]
    assert verdict.reason.endswith("no longer takes connector_output")


def test_what_kvcached_no_longer_adds_turns_its_row_red():
    target = "vllm.v1.engine.core:EngineCore._kvcached_install_ordered_unmap"
    found = red(VLLM["0.28.0"], but(KVCACHED, target, None))
    assert found == dict.fromkeys(rows_on(target, "0.28.0"), Outcome.ABSENT)
    assert "fence.install" in found


def test_a_row_whose_range_is_widened_turns_red(changed):
    row = "offloading.use_uniform_kv_cache"
    later = VLLM["0.29.0"]
    assert shapes.check_rows(later, KVCACHED)[row].outcome is Outcome.NOT_NEEDED
    changed(row, before=None)
    assert red(later) == {row: Outcome.ABSENT}
    assert any(row in hole for hole in shapes.holes("0.29.0"))


def test_a_row_that_is_narrowed_leaves_a_hole_and_its_cells_are_refused(changed):
    changed("fence.build", before="0.32")
    assert shapes.holes("0.32.0") == ["the seam fence.build has no patch for vLLM 0.32.0"]
    assert "[KVP203]" in derive.verdict(cell("0.32.0", runner="V2")).why
    assert derive.lost(derive.verdicts("0.32.0")) != []


def test_a_release_that_is_called_validated_turns_cells_red(monkeypatch):
    """Until its engines ran."""
    monkeypatch.setattr(derive.recorded, "runs", dict)
    kinds = {verdict.kind for verdict in derive.verdicts("0.31.0").values()}
    assert Kind.UNTESTED in kinds


def test_a_cell_that_was_right_and_is_refused_got_worse(status):
    status("0.28.0", supported.INSPECTED_ONLY)
    worse = derive.lost(derive.verdicts("0.28.0"))
    assert "0.28.0" in {cell.vllm for cell in worse}


@pytest.mark.parametrize(
    "fault",
    [fault for fault in supported.FAULTS if fault.target],
    ids=lambda fault: str(fault.span),
)
def test_a_fault_is_where_it_is_said_to_be(fault):
    """A release that has the fault lacks what fixed it, and the later ones have it."""
    for version, made in VLLM.items():
        said = made.targets[fault.target]
        has_it = said is not None and (
            not fault.parameter or fault.parameter in shapes.parameters(said)
        )
        assert has_it is (Version(version) >= Version(fault.fixed)), version


def test_a_release_with_a_fault_of_its_own_is_refused_for_it(found):
    def sentence(version):
        return found[cell(version)].why

    assert "because its OffloadingConnector frees the blocks of a preempted" in sentence("0.13.0")
    assert "it requires torch 2.9" in sentence("0.14.1")
    assert "frees the blocks of an aborted request" in sentence("0.15.1")
    assert found[cell("0.13.0")].kind is Kind.INCOMPATIBLE


def test_a_release_without_one_is_refused_because_it_is_not_validated(status):
    status("0.31.0", supported.INSPECTED_ONLY)
    refused = derive.verdict(cell("0.31.0"))
    assert "has not passed the full engine test matrix" in refused.why
    assert refused.kind is Kind.NOT_VALIDATED


def test_incompatible_and_not_validated_cells_are_counted_apart(found):
    for verdict in found.values():
        if verdict.kind.refused:
            assert verdict.why.startswith("kvpatch refuses to start vLLM: ")
            basis = CODES[verdict.why.rpartition("[")[2].rstrip("]")].basis
            assert (basis is Basis.INCOMPATIBLE) is (verdict.kind is Kind.INCOMPATIBLE)
    counted = counts(found.values())
    assert sum(counted.values()) == len(found)
    no_cpu_engine = [Kind.NO_CPU_ENGINE.value] if plain.runs() else []
    assert list(counted) == [
        "validated",
        "inferred",
        "incompatible",
        "not validated",
        *no_cpu_engine,
        "absent in this release",
    ]


def test_what_a_release_does_not_have_is_absent(found):
    absent = found[cell("0.18.1", "Simple eager")]
    assert absent.kind is Kind.ABSENT
    assert absent.why == "vLLM 0.18.1 has no SimpleCPUOffloadConnector"


@pytest.mark.parametrize(
    ("feature", "without", "since"),
    [("ngram", "0.31.0", "0.32.0"), ("draft model", "0.30.0", "0.31.0")],
)
def test_what_a_runner_does_not_have_is_absent(found, feature, without, since):
    def kind(release, runner):
        return found[cell(release, runner=runner, feature=feature)].kind

    assert kind(without, "V2") is Kind.ABSENT
    assert Kind.ABSENT not in (kind(since, "V2"), kind(without, "V1"))


ENDED = "NotImplementedError: no such backend on a CPU"
FP8_V1 = {"runner": "V1", "model": "full attention", "feature": "fp8"}


def plain_runs(folder, **runs):
    """A folder of results in which plain vLLM of a release ended with an error, or ran."""
    (folder / "plain").mkdir()
    for vllm, ended in runs.items():
        release = vllm.strip("v").replace("_", ".")
        result = {"vllm": release, "runs": [FP8_V1 | {"ended": ended}]}
        (folder / f"plain/vllm-{release}.json").write_text(json.dumps(result))
    return folder


def test_where_plain_vllm_ends_on_a_cpu_a_cell_says_so(monkeypatch, tmp_path, capsys):
    recorded = plain.runs(plain_runs(tmp_path, v0_20_1=ENDED, v0_20_0=""))
    monkeypatch.setattr(plain, "runs", lambda: recorded)
    waits, fp8 = Kind.NOT_VALIDATED, cell("0.20.1", feature="fp8")
    ended = derive.verdict(fp8)
    assert (ended.kind, ended.ended) == (Kind.NO_CPU_ENGINE, ENDED)
    assert ended.kind.refused
    assert not ended.kind.red
    for other in (
        replace(fp8, vllm="0.20.0"),  # where it came to its end
        replace(fp8, vllm="0.19.1"),  # where it did not run
        replace(fp8, feature="ngram"),
        replace(fp8, model="latent attention", feature=NONE),
    ):
        assert (derive.verdict(other).kind, derive.verdict(other).ended) == (waits, "")
    assert derive.verdict(cell("0.20.1")).kind is Kind.VALIDATED
    matrix = derive.matrix()
    monkeypatch.setattr(verdicts, "read", lambda: matrix)
    command = argparse.ArgumentParser()
    cli.configure(command)
    assert cli.run(command.parse_args(["--vllm", "0.20.1"])) == 0
    told = capsys.readouterr().out
    assert f"\n  plain vLLM, without kvpatch, ends on a CPU: {ENDED}\n" in told
    assert re.search(rf"^ +\d+ {re.escape(Kind.NO_CPU_ENGINE.value)}$", told, re.MULTILINE)
    assert cli.run(command.parse_args(["--vllm", "0.20.1", "--json"])) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {one.get("plain vLLM on a CPU") for one in cells if one["feature"] == "fp8"} == {
        None,  # on Runner V2, which this release does not have
        ENDED,
    }


def test_an_incompatible_cell_stays_incompatible_where_plain_vllm_ends(monkeypatch, found):
    incompatible = next(cell for cell, one in found.items() if one.kind is Kind.INCOMPATIBLE)
    monkeypatch.setattr(plain, "runs", lambda: {plain.combination_of(incompatible): ENDED})
    assert derive.verdict(incompatible) == found[incompatible]


def test_the_recorded_ends_of_plain_vllm_name_an_error_and_no_machine():
    for made, ended in plain.runs().items():
        assert made.vllm in supported.RELEASES
        assert not re.search(r"(?<![\w.])/\w+/", ended), ended
        assert len(ended) <= 300


def test_what_an_operator_allows_by_name_does_not_change_the_matrix(monkeypatch, status):
    status("0.31.0", supported.INSPECTED_ONLY)
    before = derive.verdicts("0.31.0")
    derive.forget()
    monkeypatch.setenv("KVPATCH_ALLOW_VLLM", "0.31.0")
    assert derive.verdicts("0.31.0") == before


def test_a_release_that_is_not_validated_can_be_tried(status):
    """What scripts/matrix runs on it is what would start if the operator named it."""
    status("0.31.0", supported.INSPECTED_ONLY)

    def sentence(runner, tried):
        refused = derive.refusal(cell("0.31.0", runner=runner), tried)
        return None if refused is None else str(refused)

    assert "[KVP107]" in str(sentence("V2", tried=False))
    assert sentence("V2", tried=True) is None
    assert "[KVP301]" in str(sentence("V1", tried=True))


def test_cells_with_a_feature_are_told_from_those_without():
    here = [cell("0.32.0"), cell("0.32.0", runner="V2")]
    with_it = [replace(one, feature="fp8") for one in here]
    line = "Offloading, any runner, contiguous, full attention"
    assert tables.describe(here) == [line]
    assert tables.describe(with_it) == [f"{line}, with fp8"]
    assert tables.describe([*here, *with_it]) == [f"{line}, with none or fp8"]
    right = Verdict(Kind.VALIDATED, "")
    refused = Verdict(Kind.NOT_VALIDATED, "")
    found = dict.fromkeys(here, refused) | dict.fromkeys(with_it, right)
    for connector in axes.CONNECTORS[1:]:
        found |= {replace(one, connector=connector.name): refused for one in (*here, *with_it)}
    assert tables.summary(found, "0.32.0", "Offloading") == "not validated"
    words = "V1 V2, contiguous, full attention"
    assert tables.summary(found, "0.32.0", "Offloading", "fp8") == words
    assert tables.features(found) == [("fp8", "0.32.0", words, *["not validated"] * 4)]
    combined = {one: verdict for one, verdict in found.items() if one.connector != "Multi"}
    assert tables.features(combined)[0][-1] == tables.ABSENT
    assert tables.mark(found, "0.32.0", "Offloading") == tables.REFUSED


def test_a_feature_is_set_where_the_rules_read_it():
    assert axes.configuration_of(cell("0.32.0")).cache_config.cache_dtype == "auto"
    made = axes.configuration_of(cell("0.32.0", feature="fp8"))
    assert made.cache_config.cache_dtype == "fp8"


@pytest.fixture
def ran(monkeypatch):
    """Say which cells have an engine run, and whether it was right."""

    def are(**right):
        def run(name, verdict):
            return [recorded.Run("engine", verdict, f"{name}.json", recorded.NOT_RECORDED)]

        names = {
            "older": cell("0.29.0", feature="fp8"),
            "newer": cell("0.32.0", feature="fp8"),
            "without": cell("0.31.0"),
            "other": Cell("0.29.0", "V1", "contiguous", "Multi", "full attention", "fp8"),
        }
        for name, vllm in (("older", "0.29.0"), ("newer", "0.32.0")):
            latent = replace(cell(vllm), model="latent attention")
            names[f"latent_{name}"] = latent
            names[f"ranks_{name}"] = replace(latent, feature="2 ranks")
        runs = {names[name]: run(name, verdict) for name, verdict in right.items()}
        monkeypatch.setattr(recorded, "runs", lambda: runs)

    return are


def test_a_feature_is_validated_between_two_releases_by_the_seams_they_share(ran):
    between = cell("0.31.0", feature="fp8")
    ran(older=True, newer=True, without=True)
    assert derive.by_shared_seams(between) == ["without.json", "older.json", "newer.json"]
    assert derive.by_shared_seams(cell("0.31.0")) == []  # a release runs by itself
    assert derive.by_shared_seams(cell("0.28.0", feature="fp8")) == []
    for wrong in ("older", "newer", "without"):
        ran(**dict.fromkeys(("older", "newer", "without"), True) | {wrong: False})
        assert derive.by_shared_seams(between) == []
        ran(**{name: True for name in ("older", "newer", "without") if name != wrong})
        assert derive.by_shared_seams(between) == []
    ran(other=True, newer=True, without=True)
    assert derive.by_shared_seams(between) == []


def test_a_kind_of_model_is_validated_between_two_releases_by_the_seams_they_share(ran):
    between = replace(cell("0.31.0"), model="latent attention")
    names = ("latent_older", "latent_newer", "without")
    ran(**dict.fromkeys(names, True))
    files = ["without.json", "latent_older.json", "latent_newer.json"]
    assert derive.by_shared_seams(between) == files
    for name in names:
        ran(**{one: True for one in names if one != name})
        assert derive.by_shared_seams(between) == []
    # And what is turned on beside it, without a run of the model here.
    with_ranks = replace(between, feature="2 ranks")
    ran(**dict.fromkeys((*names, "ranks_older", "ranks_newer"), True))
    assert derive.by_shared_seams(with_ranks) == [*files, "ranks_older.json", "ranks_newer.json"]
    ran(without=True, ranks_older=True, ranks_newer=True)
    assert derive.by_shared_seams(with_ranks) == []


def test_a_patch_that_did_not_run_with_the_feature_validates_nothing(ran, monkeypatch):
    ran(older=True, newer=True, without=True)
    in_force = {"0.29.0": {"a", "b"}, "0.31.0": {"a", "c"}, "0.32.0": {"c"}}
    monkeypatch.setattr(derive, "_in_force", in_force.__getitem__)
    between = cell("0.31.0", feature="fp8")
    assert derive.by_shared_seams(between)
    in_force["0.31.0"].add("d")
    assert derive.by_shared_seams(between) == []


def test_the_grid_has_a_mark_for_every_release_and_connector(found):
    grid = tables.grid(found, supported.validated())
    assert [line[0] for line in grid] == supported.validated()
    marks = {mark for line in grid for mark in line[1:]}
    assert marks <= {tables.ALL, tables.PART, tables.REFUSED, tables.ABSENT}
    assert dict(zip(CONNECTORS, grid[-1][1:], strict=True))["Offloading"] == tables.ALL


def test_the_command_prints_what_is_recorded(run):
    def matrix(*arguments):
        return run(sys.executable, "-m", "kvpatch", "matrix", *arguments, PYTHONPATH=ROOT)

    done = matrix("--json")
    assert (done.code, done.err) == (0, "")
    told = json.loads(done.out)
    assert sum(told["counts"].values()) == len(told["cells"])
    assert len(told["NPUs"]) == len(supported.VLLM_ASCEND) * len(axes.CONNECTORS)
    done = matrix()
    head, newest = done.out.splitlines()[:2]
    assert head.split("  ")[0] == "vLLM"
    assert re.fullmatch(rf"{supported.validated()[-1]}( +●){{{len(axes.CONNECTORS)}}}", newest)
    assert max(map(len, done.out.partition("\n\nverified here")[0].splitlines())) <= 100
    assert "vllm-ascend 0.23.0 on an NPU  Offloading    incompatible\n" in done.out
    done = matrix("--vllm", "0.28.0")
    assert "validated: engine/vllm-0.28.0-kvcached-0.1.6.json" in done.out
    assert (
        "with tensor parallelism: full attention and sliding windows, with any number" in done.out
    )
    assert "three where each pair of them does (KVP376)" in done.out
    done = matrix("--vllm", "0.1.0")
    assert (done.code, "stay on vLLM 0.16.0 to " in done.out) == (2, True)
    done = matrix("--vllm", "0.1.0", "--json")
    assert "stay on vLLM 0.16.0 to " in json.loads(done.out)["error"]


@pytest.mark.parametrize(
    ("text", "release"),
    [
        *((text, "0.32.0") for text in ("0.32.0", "0.32.0+cpu", "0.32", "v0.32.0")),
        *((text, "") for text in ("0.32.0rc1", "0.32.0.post1", "9.9", "newest")),
    ],
)
def test_a_release_is_the_one_that_the_gate_reads(text, release):
    assert cli.release(text, list(VLLM)) == release


def test_the_command_prints_the_outcome_of_each_patch(run):
    done = run(sys.executable, "-m", "kvpatch", "matrix", "--rows", "--json", PYTHONPATH=ROOT)
    assert (done.code, done.err) == (0, "")
    told = json.loads(done.out)
    assert list(told) == list(VLLM)
    assert told["0.32.0"]["fence.build"] == {"outcome": "applied", "reason": ""}
