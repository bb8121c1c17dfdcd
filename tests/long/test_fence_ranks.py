"""The fence with two ranks: workers in processes of their own."""

import pytest

from harness.engines.fences import TWO_RANKS, Fences


@pytest.mark.parametrize("scenario", TWO_RANKS)
def test_with_two_ranks_the_fence_keeps_what_is_lost_without_it(models, device, tmp_path, scenario):
    """The workers unmap when the engine tells them."""
    fences = Fences(models, device, tmp_path)
    fenced = fences.run(scenario, asynchronous=False, fenced=True, ranks=2)
    verdict = fenced["scenarios"][scenario]
    assert verdict["right"] >= 2 * 70
    assert verdict["wrong"] == verdict["unknown"] == 0
    assert fenced["held_now"] == fenced["retired_now"] == 0
    bare = fences.run(scenario, asynchronous=False, fenced=False, ranks=2)
    assert bare["scenarios"][scenario]["wrong"] > 0
