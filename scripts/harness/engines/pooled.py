"""Models that are run for their pooled states, with prompts that come back from the CPU tier."""

from dataclasses import replace

from harness.engines.oracle import PLAIN, Engine
from harness.engines.runs import BLOCK, Run
from harness.engines.tiers import APART, SMALL, Serve, answers, assert_found

POOLING = (("runner", "pooling"), ("convert", "embed"))


def assert_comes_back(serve: Serve, engine: Engine, wanted: Run) -> None:
    """The second time, blocks come from the tier; both times the states are plain vLLM's."""
    plain = engine(replace(PLAIN, vllm=wanted.vllm, runner=wanted.runner, settings=POOLING))
    run = replace(wanted, settings=POOLING)
    ours = serve(run, times=2, watch=not wanted.simple, engine=SMALL["llama"])
    for time, found in enumerate((0, 640)):
        assert_found(ours, plain, found, time)
    assert len({tuple(one["logprobs"]) for one in answers(ours)}) == APART
    assert "KV on elastic memory: yes" in ours.log
    seen = ours.result["simple"] if wanted.simple else ours.result
    device = SMALL["llama"]["num_gpu_blocks_override"]
    # Lazy mode stores what is about to leave the device, and what did not leave is not loaded.
    assert seen["loaded" if wanted.simple else "returned"] >= APART * 640 // BLOCK - device
    assert seen["changed"] == (0 if wanted.simple else [])
