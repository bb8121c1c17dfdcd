"""Speculative decoding: tokens, bytes and accepted drafts are those of plain vLLM.

On one schedule: what is drafted depends on it. The matrix has the other connectors and Runner V2.
"""

import pytest

from harness import experts, releases
from harness.engines.fences import Fences
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


def ahead(how: str, asynchronous: bool) -> bool:
    """Whether vLLM can schedule a step ahead of drafts that it makes between two steps."""
    return asynchronous and how != "ngram"


# The other two are cells of the matrix.
@DRAFTING
@pytest.mark.parametrize(
    ("contiguous", "asynchronous"),
    [(True, True), (False, False)],
    ids=["contiguous-async", "non-contiguous-sync"],
)
def test_tokens_bytes_and_accepted_drafts_are_those_of_plain_vllm(
    engine, how, contiguous, asynchronous
):
    model = experts.KIND if how == "mtp" else "llama"
    wanted = {"model": model, "speculation": how, "asynchronous": ahead(how, asynchronous)}
    plain = engine(Run(kvpatch=False, offload=False, **wanted))
    ours = engine(Run(contiguous=contiguous, **wanted))
    assert_same(ours, plain)
    assert ours.result["async"] == plain.result["async"] == wanted["asynchronous"]
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


@pytest.fixture(scope="module")
def fences(models, device, tmp_path_factory):
    """The fence's scenarios by how drafts are made."""
    made: dict[str, Fences] = {}

    def fences(how: str) -> Fences:
        if how not in made:
            folder = tmp_path_factory.mktemp(how.replace(" ", "-"))
            made[how] = Fences(models, device, folder)
            made[how].speculation = how
        return made[how]

    yield fences


# mtp is a layer of the model of experts, whose blocks the scenarios do not have.
@pytest.mark.parametrize("how", [one for one in STARTS if one != "mtp"])
@SCENARIOS
def test_no_rejected_draft_is_stored(fences, how, scenario):
    # tests/engine/test_fence.py has both ways of scheduling; here each way to draft has one.
    result = fences(how).run(scenario, how == "draft model", fenced=True)
    verdict = result["scenarios"][scenario]
    assert verdict["right"] >= 40
    assert verdict["wrong"] == verdict["unknown"] == 0
    assert result["held_now"] == result["retired_now"] == 0
    if scenario == "generate":
        assert verdict["drafted"] > verdict["accepted"]  # some were rejected
