"""The fence with two ranks: workers in processes of their own."""

import pytest

from harness.engines.fences import TWO_RANKS, assert_right


@pytest.mark.parametrize("scenario", TWO_RANKS)
def test_with_two_ranks_the_fence_keeps_what_is_lost_without_it(fences, scenario):
    """The workers unmap when the engine tells them."""
    assert_right(fences().run(scenario, asynchronous=False, fenced=True, ranks=2), scenario, 2 * 70)
    bare = fences().run(scenario, asynchronous=False, fenced=False, ranks=2)
    assert bare["scenarios"][scenario]["wrong"] > 0
