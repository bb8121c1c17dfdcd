"""Each interleaving that the fence is for loses blocks without it."""

import pytest

from harness.engines.fences import LOST_WITHOUT


@pytest.mark.parametrize(
    ("scenario", "asynchronous"),
    # From 0.30 on the connector does not store what leaves a sliding window in the same step.
    [
        (name, mode)
        for mode, names in LOST_WITHOUT.items()
        for name in sorted(names - {"window_skip"})
    ],
)
def test_without_the_fence_blocks_are_lost(fences, scenario, asynchronous):
    result = fences().run(scenario, asynchronous, fenced=False)
    assert result["async"] is asynchronous
    assert result["scenarios"][scenario]["wrong"] > 0
