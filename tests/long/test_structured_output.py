"""Answers that must match a pattern, of prompts that come back from the CPU tier."""

from dataclasses import replace

import pytest

from harness.engines.oracle import PLAIN, assert_same_round
from harness.engines.runs import BLOCK, Run, prompts
from harness.engines.tiers import SMALL, hits

# Longer than any answer, so that each ends by its number of tokens. Every second prompt has one:
# a request that waits for its grammar is beside one that waits for its blocks.
PATTERN = "[0-9]{100}"
ASKED = [
    prompt | ({"pattern": PATTERN} if number % 2 else {})
    for number, prompt in enumerate(prompts(8, max_tokens=7))
]


# A grammar is the scheduler's and blocks are the connector's; the matrix has both with each other.
@pytest.mark.parametrize(
    ("connector", "asynchronous"),
    [("", True), ("eager", False)],
    ids=["Offloading-async", "Simple-sync"],
)
def test_an_answer_of_a_pattern_is_plain_vllms(serve, connector, asynchronous):
    plain = serve(PLAIN, rounds=[ASKED], engine=SMALL["llama"]).round(0)
    free = serve(PLAIN, rounds=[prompts(8, max_tokens=7)], engine=SMALL["llama"]).round(0)
    matched = [number for number, prompt in enumerate(ASKED) if "pattern" in prompt]
    assert all(plain[one]["tokens"] != free[one]["tokens"] for one in matched)
    assert len({token for one in matched for token in plain[one]["tokens"]}) <= 10
    run = replace(Run(), simple=connector, asynchronous=asynchronous)
    ours = serve(run, rounds=[ASKED] * 2, watch=not connector, engine=SMALL["llama"])
    for index in range(2):
        assert_same_round(ours.round(index), plain)
    assert hits(ours.round(1)) == [640] * len(ASKED)
    copies = ours.result["simple"] if connector else ours.result
    assert not copies["changed"]
    # All but what a device of this size can have kept.
    blocks = len(ASKED) * 640 // BLOCK - SMALL["llama"]["num_gpu_blocks_override"]
    assert copies["loaded" if connector else "returned"] >= blocks
