"""The verdicts on NPUs: of recorded runs on the ACL emulator, and never those of other cells."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from harness import ROOT, provenance
from harness.evidence import of_run
from harness.matrix import command, derive, npus, record, recorded, shapes
from harness.matrix import npu as engines
from kvpatch.matrix import tables
from kvpatch.matrix.verdicts import Kind, Verdict
from kvpatch.patches.ascend import FEATURE, ran, rules
from kvpatch.versions import Span

RELEASE = "0.23.0"
EAGER = npus.cell(RELEASE, "Simple eager")
HEAD = {"vllm": RELEASE, "kvcached": "0.1.6", "vllm-ascend": RELEASE}
AXES = {name: getattr(EAGER, name) for name in ("runner", "layout", "connector", "model")}
ROWS = [patch.id for patch in FEATURE.patches]


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path):
    """Runs of NPUs that are recorded in a folder of the test's; none at first."""
    for module in (shapes, record):
        monkeypatch.setattr(module, "DATA", tmp_path)
    for name in ("on_npu", "runs"):
        read = getattr(recorded, name).__wrapped__
        monkeypatch.setattr(recorded, name, lambda data=tmp_path, read=read: read(data))
    monkeypatch.setattr(derive, "forget", lambda: None)
    monkeypatch.setattr(provenance, "commit", lambda: "0123456789ab")
    yield tmp_path


def ran_on_npu(right, level=recorded.NPU, patches=ROWS):
    executed = {f"row:{one}": "1" for one in patches}
    record.record_run(level, HEAD, AXES | {"right": right}, executed)


def of(connector):
    return npus.verdict(RELEASE, npus.cell(RELEASE, connector))


def test_without_a_record_nothing_is_validated():
    assert of("Simple eager") == Verdict(Kind.NOT_VALIDATED, npus.NOT_RECORDED)
    assert Kind.EMULATED not in {one.kind for one in npus.verdicts().values()}


def test_a_right_run_on_the_emulator_has_a_verdict_of_its_own():
    ran_on_npu(right=True)
    assert of("Simple eager").kind is Kind.EMULATED
    assert of("Simple eager").kind.value == "validated (ACL emulator)"
    assert of("Simple eager").why == "npu/vllm-0.23.0-kvcached-0.1.6.json"
    ((name, *words),) = tables.on_npus(npus.verdicts())
    assert name == "vllm-ascend 0.23.0 on an NPU"
    assert words.count("validated (ACL emulator)") == 1
    assert "validated" not in words


def test_a_wrong_run_is_wrong():
    ran_on_npu(right=False)
    assert of("Simple eager").kind is Kind.WRONG
    ran_on_npu(right=True)  # takes its place
    assert of("Simple eager").kind is Kind.EMULATED


def test_a_run_of_a_gpus_engine_validates_no_npu_and_the_other_way_round():
    ran_on_npu(right=True, level="engine")
    assert of("Simple eager").kind is Kind.NOT_VALIDATED
    assert EAGER in recorded.runs()
    assert EAGER not in recorded.on_npu()
    ran_on_npu(right=True)
    assert [run.level for run in recorded.runs()[EAGER]] == ["engine"]
    assert [run.level for run in recorded.on_npu()[EAGER]] == ["npu"]


def test_a_run_names_the_emulator_and_others_the_host_device():
    on_npu, on_host = (of_run.native(level).keys() for level in ("npu", "engine"))
    assert {name.split("/")[1] for name in on_host} == {"hostdevice"}
    assert {Path(name).parts[2] for name in on_npu} == {"acl", "npu", "include"}
    assert on_npu.isdisjoint(on_host)


@pytest.mark.parametrize("connector", ["Offloading", "tiering fs", "Multi"])
def test_offloading_connector_is_incompatible_with_its_reason(connector):
    ran_on_npu(right=True)
    assert of(connector).kind is Kind.INCOMPATIBLE
    assert "NPUOffloadingSpec does not import on the vLLM that it is paired with" in (
        of(connector).why
    )
    assert of(connector).why.endswith("[KVP604]")


def test_a_release_that_has_the_mend_ends_its_range(monkeypatch):
    monkeypatch.setattr(rules, "WITHOUT_SPEC", Span("0.22", "0.23"))
    assert of("Offloading").kind is Kind.NOT_VALIDATED  # until it ran
    assert of("Offloading").why.endswith("[KVP606]")


@pytest.fixture
def ran_with(monkeypatch):
    """Run the command on engines that served this; returns the connectors that ran."""

    def ran_with(**changes):
        asked = []

        def served(release, folder, offload, kvpatch, load, device):
            asked.append(f"{release} {offload} {kvpatch} {load} {device}")
            (trial,) = [one for one in engines.TRIALS.values() if one.offload == offload]
            rounds = [{"tokens": [[1]], "cached": one, "emptied": True} for one in trial.cached]
            if kvpatch == "0":
                return {"rounds": rounds, "expected": [[1]]}
            rounds[-1].update(changes)
            settings = {"cache_config.block_size": 128}
            return {"rounds": rounds, "patches": ROWS, "versions": {"a": "1"}, "settings": settings}

        monkeypatch.setattr(engines, "served", served)
        monkeypatch.setattr(command, "report_cells", lambda: 0)
        arguments = Namespace(releases=[], keep=shapes.DATA / "keep")
        assert command.compute_ascend(arguments) == int(bool(changes))
        return asked

    return ran_with


def test_the_command_records_what_starts(ran_with, data):
    assert ran_with() == [
        f"0.23.0 {offload} {kvpatch} {load}"
        for offload, load in (("eager", "rounds 64"), ("lazy", "in turn 32"))
        for kvpatch in ("0", "1")
    ]
    assert of("Simple eager").kind is of("Simple lazy").kind is Kind.EMULATED
    (path,) = (data / recorded.NPU).glob("*.json")
    content = json.loads(path.read_text())
    assert content["command"] == "scripts/matrix ascend 0.23.0"
    assert (content["vllm-ascend"], content["versions"]) == ("0.23.0", {"a": "1"})
    assert content["machine"].startswith("ACL emulator, ")
    ((code,), (run, _)) = content["code"].values(), content["runs"]
    assert set(ROWS) == recorded.on_npu()[EAGER][0].code.patches
    assert code["commit"] == "0123456789ab"
    assert run["settings"] == {"cache_config.block_size": 128}
    assert all(run["checks"].values())


@pytest.mark.parametrize("change", [{"tokens": [[2]]}, {"cached": [0] * 4}, {"emptied": False}])
def test_the_command_records_what_is_wrong(ran_with, change):
    ran_with(**change)
    assert of("Simple eager").kind is Kind.WRONG


def test_static_memory_that_is_wrong_validates_nothing():
    rounds = [{"tokens": [[1]], "cached": one, "emptied": True} for one in engines.SERVED_BACK]
    trial = engines.TRIALS["Simple eager"]
    found = engines.judged({"rounds": rounds, "expected": [[2]]}, {"rounds": rounds}, trial)
    assert list(found.values()) == [False, True, True, True]


def test_the_committed_runs_have_the_settings_that_start():
    for path in (ROOT / "docs/results/matrix" / recorded.NPU).glob("*.json"):
        for run in json.loads(path.read_text())["runs"]:
            assert run["settings"].keys() == ran.RAN.keys()
            assert all(value in ran.RAN[name] for name, value in run["settings"].items())
