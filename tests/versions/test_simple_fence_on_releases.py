"""SimpleCPUOffloadConnector's own fence on other releases, as the engine lane shows it."""

import pytest

from harness.engines.fences import SIMPLE_TOGETHER, SimpleFences, assert_simple_right
from harness.engines.fixtures import MODES, SCHEDULING

RELEASES = {"0.19.1": "v1", "0.22.1": "v1", "0.24.0": "v1", "0.30.0": "v2", "0.32.0": "v2"}
# Its own bookkeeping notices there that a block it has stored is another's.
NOTICES = ("0.30.0", "0.32.0")


def run(fences, vllm, *scenario, **more):
    return fences(SimpleFences, vllm, RELEASES[vllm]).run_simple(*scenario, **more)


@pytest.mark.parametrize("vllm", RELEASES)
@SCHEDULING
@MODES
@pytest.mark.parametrize("scenario", [*SIMPLE_TOGETHER, "preempt"])
def test_every_stored_block_is_right_and_nothing_is_left(
    fences, scenario, mode, asynchronous, vllm
):
    result = run(fences, vllm, scenario, mode, asynchronous)
    assert_simple_right(result, scenario)
    assert result["async"] is asynchronous


@pytest.mark.parametrize("vllm", NOTICES)
def test_without_its_references_the_connector_ends_the_engine(fences, vllm):
    """The references are needed: without them a block that it has stored is another's."""
    with pytest.raises(AssertionError, match="_process_store_completion"):
        run(fences, vllm, "finish_in_flight", "eager", unpinned=True)


@pytest.mark.parametrize("vllm", [vllm for vllm in RELEASES if vllm not in NOTICES])
def test_without_its_references_blocks_are_lost(fences, vllm):
    result = run(fences, vllm, "finish_in_flight", "eager", unpinned=True)
    assert result["scenarios"]["finish_in_flight"]["wrong"] > 0
