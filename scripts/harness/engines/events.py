"""KV cache events of an engine, against those of plain vLLM on one schedule."""

from collections import Counter
from typing import Any

from harness.engines.runs import Finished, Run

# Hashes are compared between processes; the cap on cached tokens is kvcached's own.
STEADY = (("PYTHONHASHSEED", "0"), ("KVCACHED_MAX_CACHED_TOKENS", "-1"))
RUN = Run(events=True, cpu_blocks=200, environment=STEADY)


def of_medium(finished: Finished, medium: str) -> list[dict[str, Any]]:
    """The events of one tier; a reset is the GPU's."""
    return [one for one in finished.result["events"] if one.get("medium", "GPU") == medium]


def assert_same_events(ours: Finished, plain: Finished) -> None:
    """Compare order and content, tier by tier: a copy ends when it ends.

    ``plain`` is vLLM with the same connector on its own memory.
    """
    for finished in (ours, plain):
        finished.round(1)
    for medium in ("GPU", "CPU"):
        assert of_medium(ours, medium) == of_medium(plain, medium)
    # 24 prompts of 20 blocks on 127: most are stored, and removed by the next.
    counted = Counter(one["event"] for one in of_medium(ours, "GPU"))
    assert counted["BlockStored"] >= 24
    assert counted["BlockRemoved"] > 200
    assert counted["AllBlocksCleared"] == 1
    tier = Counter(one["event"] for one in of_medium(ours, "CPU"))
    assert tier["BlockStored"] > 200
    assert tier["BlockRemoved"] > 0
