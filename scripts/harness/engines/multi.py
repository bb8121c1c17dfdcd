"""SimpleCPUOffloadConnector inside vLLM's MultiConnector."""

from dataclasses import replace

from harness.engines.oracle import Engine, assert_same
from harness.engines.runs import ALL, Run, prompts
from harness.engines.tiers import Serve

INSIDE = ("NothingConnector", "OffloadingConnector")


def compare_simple_inside(run: Run, engine: Engine, serve: Serve) -> None:
    """Compare SimpleCPUOffloadConnector inside a MultiConnector with plain vLLM.

    In lazy mode beside OffloadingConnector, which finds what the device lost first.
    """
    beside = "NothingConnector" if run.simple == "eager" else "OffloadingConnector"
    run = replace(run, inside=("SimpleCPUOffloadConnector", beside))
    ours = serve(run, rounds=[prompts(ALL)] * 2)
    assert_same(ours, engine(Run(kvpatch=False, offload=False, vllm=run.vllm)))
    assert [record["cached"] for record in ours.round(1)] == [640] * ALL
    seen = ours.result["simple"]
    assert seen["stored"] > 0
    assert seen["loaded"] > 0 or run.simple == "lazy"
    assert seen["changed"] == seen["pinned"] == 0
    assert seen["device_calls"] == {}
