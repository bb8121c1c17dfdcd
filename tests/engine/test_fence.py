"""The fence: with it no interleaving loses data; tests/long has each lose without it."""

import pytest

from harness.engines.fences import ALONE, BOTH_LOADED, TOGETHER, assert_right
from harness.engines.fixtures import SCHEDULING

EVERY = pytest.mark.parametrize("scenario", [*TOGETHER, *ALONE])


@SCHEDULING
@EVERY
def test_with_the_fence_every_stored_block_is_right(fences, scenario, asynchronous):
    result = fences().run(scenario, asynchronous, fenced=True)
    assert_right(result, scenario)
    assert result["async"] is asynchronous
    assert result["counters"]["released"] > 0


@SCHEDULING
def test_memory_is_back_two_steps_after_the_last_copy(fences, asynchronous):
    verdict = fences().run("give_back", asynchronous, fenced=True)["scenarios"]["give_back"]
    assert verdict["most"] >= 4 * (2 << 20)  # a page holds 2 MiB of each layer
    assert verdict["kept"] == 0
    assert verdict.get("steps", 0) <= 2
    # An engine of its own goes to sleep now.
    assert verdict["asks_for_steps"] is False


@SCHEDULING
def test_a_block_that_ends_with_a_token_never_computed_is_not_stored(fences, asynchronous):
    result = fences().run("last_token", asynchronous, fenced=True)
    assert assert_right(result, "last_token")["right"] == 40  # of 41 blocks


@SCHEDULING
def test_loaded_requests_do_not_wait_for_each_other(fences, asynchronous):
    assert_right(fences().run(BOTH_LOADED, asynchronous, fenced=True), BOTH_LOADED, 47 + 48)


def test_without_the_patch_loaded_requests_wait_for_ever(fences):
    standing = fences()
    run, job = standing.prepare((BOTH_LOADED,), asynchronous=False, ranks=1)
    # It stands still for good: no need to tell that from a slow machine.
    job |= {"may_hold": False, "revert": ["deadlock.schedule"], "patience": 0}
    ended = standing.drive(job, run, standing.folder / "result.json")
    assert "did not finish in 400 steps" in ended.log, ended.log[-4000:]
