"""kvcached's patches lie under ours on real vLLM, whichever hook came first."""

import json
import os
import sys
from pathlib import Path

import pytest

from kvpatch import patches
from kvpatch.supported import release_of
from kvpatch.versions import installed

ROOT = Path(__file__).parents[2]
PACKAGES = Path(pytest.__file__).parents[1]

# Without site no startup file runs by itself; each step below is one of theirs.
STEPS = {
    "kvcached's startup file": f"exec(open({str(PACKAGES / 'kvcached_autopatch.pth')!r}).read())",
    "kvcached's module": "import kvcached.integration.vllm.autopatch",
    "kvpatch": "import kvpatch",
}
UNASKED = ("ascend", "debug", "first-limit", "host-pool")  # for an NPU; others have a variable
REPORT = """
import inspect, json, vllm
from vllm.v1.engine.core import EngineCore
from wrapt import FunctionWrapper
from kvpatch import activation
from kvpatch.status import record
applied = activation.transaction.applied
under = inspect.getattr_static(EngineCore, "__init__")
while isinstance(under, FunctionWrapper):
    under = under.__wrapped__
print("\\n" + json.dumps({
    "features": {name: outcome.value for name, outcome in record.features.items()},
    "applied": [one.patch.id for one in applied],
    "covered": [one.patch.id for one in applied
                if vars(one.parent).get(one.attribute) is not one.replacement],
    "under ours": f"{under.__module__}.{under.__name__}",
}))
"""


@pytest.mark.parametrize(
    "order",
    [
        ("kvcached's startup file", "kvpatch"),
        ("kvpatch", "kvcached's startup file"),
        ("kvpatch", "kvcached's module"),
        ("kvpatch",),
    ],
    ids=" then ".join,
)
def test_ours_lie_over_kvcacheds(run, machine, order):
    release = release_of(installed("vllm")[0])
    rows = {
        feature.name: () if feature.name in UNASKED else feature.at(release)
        for feature in patches.FEATURES
    }
    code = "\n".join(STEPS[step] for step in order) + REPORT
    path = f"{ROOT}:{PACKAGES}"
    environment = machine | {"PYTHONPATH": path, "KVPATCH_LOG": "debug"}
    done = run(sys.executable, "-S", "-c", code, **environment)
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if line.startswith('{"features"')]
    report = json.loads(line)
    ids = [patch.id for patches in rows.values() for patch in patches]
    targets = [patch.target for patches in rows.values() for patch in patches]
    twice = [id for id, target in zip(ids, targets, strict=True) if targets.count(target) > 1]
    assert report["features"] == {
        name: "applied" if patches else "not-needed" for name, patches in rows.items()
    }
    assert report["applied"] == ids
    # vLLM's logging configuration has come and gone between the first line and the last.
    said = [line for line in done.err.splitlines() if "] kvpatch: applied " in line]
    assert [line.split()[-3] for line in said] == ids
    # A target of two of our own patches shows the later one.
    assert set(report["covered"]) < set(twice) or report["covered"] == twice == []
    assert report["under ours"].startswith("kvcached.integration.vllm.patches.")


@pytest.mark.parametrize("switch", ["1", "0"])
def test_doctor_passes_all_gates_on_real_vllm(run, machine, switch):
    """Before anybody starts an engine, and with kvpatch off as with it on."""
    done = run(sys.executable, "-m", "kvpatch", "doctor", **machine | {"KVPATCH": switch})
    assert done.code == 0, done.out
    assert "patches applied: " in done.out
    assert "host-device applied" in done.out
    assert "elastic-memory applied" in done.out


def test_doctor_finds_a_target_that_cannot_be_imported(run, machine, tmp_path):
    """Nothing but an import shows it; a start refuses it."""
    lost = "vllm.v1.simple_kv_offload.manager"
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{lost!r}] = None\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), machine.get("PYTHONPATH")]))
    done = run(sys.executable, "-m", "kvpatch", "doctor", **machine | {"PYTHONPATH": path})
    assert done.code == 1
    assert "the feature simple-offload cannot be applied (absent)" in done.out
    assert "[KVP201]" in done.out
    done = run(
        *(sys.executable, "-m", "kvpatch", "doctor", "--no-import"),
        **machine | {"PYTHONPATH": path},
    )
    assert done.code == 0


def test_doctor_reports_the_sentence_that_stops_the_import(run, machine):
    done = run(
        sys.executable,
        "-m",
        "kvpatch",
        "doctor",
        "--import",
        **machine | {"KVPATCH_HOST_DEVICE": ""},
    )
    assert done.code == 1
    assert "PROBLEM kvpatch refuses to start vLLM: this machine has no GPU and the" in done.out
    assert "[KVP502]" in done.out
