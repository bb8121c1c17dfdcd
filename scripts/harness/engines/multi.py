"""SimpleCPUOffloadConnector inside vLLM's MultiConnector."""

from dataclasses import replace
from pathlib import Path

from harness.engines.oracle import Engine, assert_same
from harness.engines.runs import ALL, Device, Run, engine_arguments, prompts, run_driver

INSIDE = ("NothingConnector", "OffloadingConnector")


def compare_simple_inside(
    run: Run, engine: Engine, model: Path, device: Device, folder: Path
) -> None:
    """Compare SimpleCPUOffloadConnector inside a MultiConnector with plain vLLM.

    In lazy mode beside OffloadingConnector, which finds what the device lost first.
    """
    beside = "NothingConnector" if run.simple == "eager" else "OffloadingConnector"
    run = replace(run, inside=("SimpleCPUOffloadConnector", beside))
    job = {
        "model": str(model),
        "engine": engine_arguments(run),
        "rounds": [prompts(ALL)] * 2,
        "nothing_connector": True,
    }
    ours = run_driver(job, device.environ(run), folder, vllm=run.vllm)
    assert_same(ours, engine(Run(kvpatch=False, offload=False, vllm=run.vllm)))
    assert [record["cached"] for record in ours.round(1)] == [640] * ALL
    seen = ours.result["simple"]
    assert seen["stored"] > 0
    assert seen["loaded"] > 0 or run.simple == "lazy"
    assert seen["changed"] == seen["pinned"] == 0
    assert seen["device_calls"] == {}
