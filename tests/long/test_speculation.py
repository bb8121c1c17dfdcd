"""Speculative decoding: tokens, bytes and accepted drafts are those of plain vLLM.

On one schedule: what is drafted depends on it. The matrix has the other connectors and Runner V2.
"""

import pytest

from harness import experts, releases
from harness.engines.fences import assert_right
from harness.engines.oracle import assert_same
from harness.engines.runs import ALL, SPECULATIONS, Run, restored_tokens
from kvpatch import admitted

# Those that start: with the others the engine is refused until their cells ran.
STARTS = [one for one in SPECULATIONS if releases.newest_built() in admitted.table().get(one, {})]
DRAFTING = pytest.mark.parametrize("how", STARTS)
# Requests that end, generate and are preempted while blocks are stored: with drafts a step fills
# blocks with tokens that may be rejected.
SCENARIOS = pytest.mark.parametrize(
    "scenario", ["finish_in_flight", "last_token", "generate", "preempt"]
)


# With asynchronous scheduling both layouts are cells of the matrix.
@DRAFTING
def test_tokens_bytes_and_accepted_drafts_are_those_of_plain_vllm(engine, how):
    wanted = {"model": experts.KIND if how == "mtp" else "llama", "speculation": how}
    plain = engine(Run(kvpatch=False, offload=False, **wanted))
    ours = engine(Run(contiguous=False, **wanted))
    assert_same(ours, plain)
    assert ours.result["async"] is plain.result["async"] is False
    for index in range(2):
        drafts = [[one["drafts"] for one in run.round(index)] for run in (ours, plain)]
        assert [accepted for _, accepted in drafts[0]] == [accepted for _, accepted in drafts[1]]
        assert all(drafted > 0 for drafted, _ in drafts[0])
        if how == "draft model":  # the others' are right by chance
            assert sum(accepted for _, accepted in drafts[0]) > ALL
    restored = restored_tokens(Run(**wanted), 640)
    assert all(record["cached"] >= restored for record in ours.round(1))
    assert ours.result["returned"] >= ALL * restored // 32
    assert ours.result["changed"] == []


# mtp is a layer of the model of experts, whose blocks the scenarios do not have.
@pytest.mark.parametrize("how", [one for one in STARTS if one != "mtp"])
@SCENARIOS
def test_no_rejected_draft_is_stored(fences, how, scenario):
    # tests/engine/test_fence.py has both ways of scheduling; here each way to draft has one.
    of_drafts = fences(speculation=how)
    verdict = assert_right(of_drafts.run(scenario, how == "draft model", fenced=True), scenario)
    if scenario == "generate":
        assert verdict["drafted"] > verdict["accepted"]  # some were rejected
