"""MultiConnector on older releases: the fence finds its connector in it, and Simple is right."""

import pytest

from harness import releases
from harness.engines.fences import SHARED, TOGETHER, Fences, assert_right
from harness.engines.fixtures import LAYOUTS
from harness.engines.multi import INSIDE, compare_simple_inside
from harness.engines.runs import Run

RELEASES = releases.between("0.16", before="0.28")
# Before, a MultiConnector does not give SimpleCPUOffloadConnector the device's blocks (KVP362), and
# up to 0.20 vLLM itself keeps the blocks of a request that has ended until they are stored.
LATER = releases.between("0.22", before="0.28")


class InMulti(Fences):
    """The fence's interleavings, behind a connector that keeps nothing."""

    every = SHARED
    inside = INSIDE


@pytest.mark.parametrize("vllm", RELEASES)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_with_the_fence_every_stored_block_is_right(fences, vllm, asynchronous):
    result = fences(InMulti, vllm).run("finish", asynchronous, fenced=True)
    for scenario in TOGETHER:
        assert_right(result, scenario)
    # An engine of its own is stepped until the pages are back, and goes to sleep then.
    assert result["scenarios"]["give_back"]["asks_for_steps"] is False
    assert result["counters"]["released"] > 0


@pytest.mark.parametrize("vllm", LATER)
def test_without_the_fence_blocks_are_lost(fences, vllm):
    result = fences(InMulti, vllm).run("finish", asynchronous=False, fenced=False)
    assert result["scenarios"]["finish"]["wrong"] > 0


@LAYOUTS
@pytest.mark.parametrize("vllm", LATER)
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_simple_is_right_in_it_too(engine, serve, vllm, mode, contiguous):
    compare_simple_inside(Run(contiguous=contiguous, simple=mode, vllm=vllm), engine, serve)
