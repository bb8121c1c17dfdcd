"""What plain vLLM finds again in its CPU tier beside drafts by mtp."""

from dataclasses import replace

import pytest

from harness.engines.runs import Run

WINDOWS = Run(kvpatch=False, model="sliding", experts=True, vllm="0.33.0", runner="v2")
STATES = Run(
    kvpatch=False,
    model="hybrid",
    experts=True,
    vllm="0.33.0",
    runner="v2",
    dtype="bfloat16",
    together=1,
    extra=(("block_size", 256),),
)


@pytest.mark.parametrize("wanted", [WINDOWS, STATES], ids=["windows", "chunks of a hybrid"])
def test_plain_vllm_finds_nothing_beside_mtp(engine, wanted):
    """The reason of KVP395: with the same, and no drafts, it does."""
    for speculation, finds in (("mtp", False), ("", True)):
        run = replace(wanted, speculation=speculation, experts=bool(speculation))
        cached = [record["cached"] for record in engine(run).round(1)]
        assert [bool(tokens) for tokens in cached] == [finds] * len(cached)
