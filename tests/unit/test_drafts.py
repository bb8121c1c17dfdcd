"""What counts as an accepted draft, and what an engine run of the matrix must have done."""

from types import SimpleNamespace

import pytest

from harness.engines.drafts import Drafts
from harness.engines.runs import Run, restored_tokens
from harness.matrix.cells import CACHED, PROMPTS, TRIALS, judge


class Scheduler:
    """One step after the other for requests of a name and a limit."""

    def __init__(self, **limits):
        self.requests = {
            f"0-{name}-abc": SimpleNamespace(
                max_tokens=limit, num_output_tokens=1, is_finished=lambda: False
            )
            for name, limit in limits.items()
        }

    def update_from_output(self, planned, output):
        return "updated"


@pytest.fixture
def step():
    """Let a step draft and sample for one request; return what is counted."""
    scheduler = Scheduler(a=7)
    drafts = Drafts(scheduler)

    def step(drafted, sampled, *, generated=1, name="0-a-abc"):
        if name in scheduler.requests:
            scheduler.requests[name].num_output_tokens = generated
        planned = SimpleNamespace(scheduled_spec_decode_tokens={name: [-1] * drafted})
        output = SimpleNamespace(sampled_token_ids=[[5] * sampled], req_id_to_index={name: 0})
        assert scheduler.update_from_output(planned, output) == "updated"
        return drafts.counts.get("0-a", [0, 0])

    step.scheduler, step.drafts = scheduler, drafts
    return step


def test_all_but_the_last_token_of_a_step_are_drafts(step):
    assert step(3, 1) == [3, 0]
    assert step(3, 3) == [6, 2]
    assert step(3, 0) == [9, 2]  # of a step that sampled nothing
    assert step.drafts.total == [9, 2]
    assert step.drafts.pop("0-a") == [9, 2]
    assert step.drafts.pop("0-a") == [0, 0]


@pytest.mark.parametrize(("generated", "accepted"), [(3, 3), (4, 3), (5, 2), (6, 1)])
def test_a_draft_beyond_the_last_token_is_in_no_answer(step, generated, accepted):
    assert step(3, 4, generated=generated)[1] == accepted


def test_a_step_after_the_last_one_does_not_count(step):
    assert step(3, 2, name="0-gone-abc") == [0, 0]
    step.scheduler.requests["0-a-abc"].is_finished = lambda: True
    assert step(3, 2) == [0, 0]


def answer(cached=0, drafts=None, token=1):
    made = {"tokens": [token], "logprobs": [-1.0], "cached": cached}
    return made | ({"drafts": list(drafts)} if drafts else {})


def judged(how="", cached=CACHED, ours=(9, 2), theirs=(6, 2), **changes):
    """The verdict on a run of OffloadingConnector."""
    drafts = [pair if how else None for pair in (ours, theirs)]
    result = {
        "rounds": [[answer(at, drafts[0]) for _ in range(PROMPTS)] for at in (0, cached)],
        "returned": PROMPTS * 20,
        "changed": [],
        "patches": [],
        "elastic": True,
        "async": False,
        "runner": "v1",
    }
    plain = {"rounds": [[answer(0, drafts[1]) for _ in range(PROMPTS)]] * 2, "runner": "v1"}
    return bool(judge(result | changes, plain, TRIALS["Offloading"], Run(speculation=how))["right"])


def test_a_run_that_did_what_plain_vllm_does_is_right():
    assert judged()
    assert not judged(cached=CACHED - 32)
    assert not judged(changed=[4])
    assert not judged(returned=PROMPTS * 20 - 1)
    assert not judged(elastic=False)
    assert not judged(**{"async": True})


@pytest.mark.parametrize("how", ["ngram", "draft model", "EAGLE"])
def test_it_accepts_as_many_drafts_whatever_it_drafted(how):
    assert judged(how)
    assert not judged(how, ours=(9, 3))
    assert not judged(how, ours=(0, 2))
    assert judged(how, ours=(9, 0), theirs=(9, 0)) is (how != "draft model")


def test_with_an_eagle_head_the_last_block_of_a_hit_is_computed_again():
    assert restored_tokens(Run(speculation="EAGLE"), 640) == 608
    assert restored_tokens(Run(speculation="draft model"), 640) == 640
    assert judged("EAGLE", cached=608, returned=PROMPTS * 19)
    assert not judged("EAGLE", cached=576)
    assert not judged("draft model", cached=608)
