"""SimpleCPUOffloadConnector's own fence on other releases, as the engine lane shows it."""

import pytest

from harness.engines.fences import SIMPLE_TOGETHER, SimpleFences
from harness.engines.fixtures import MODES, SCHEDULING

RELEASES = {"0.19.1": "v1", "0.22.1": "v1", "0.24.0": "v1", "0.30.0": "v2", "0.32.0": "v2"}
# Its own bookkeeping notices there that a block it has stored is another's.
NOTICES = ("0.30.0", "0.32.0")


@pytest.fixture(scope="module")
def fences(models, device, tmp_path_factory):
    made = {
        vllm: SimpleFences(models, device, tmp_path_factory.mktemp("fence"), vllm, runner)
        for vllm, runner in RELEASES.items()
    }
    return made.__getitem__


@pytest.mark.parametrize("vllm", RELEASES)
@SCHEDULING
@MODES
@pytest.mark.parametrize("scenario", [*SIMPLE_TOGETHER, "preempt"])
def test_every_stored_block_is_right_and_nothing_is_left(
    fences, scenario, mode, asynchronous, vllm
):
    result = fences(vllm).run_simple(scenario, mode, asynchronous)
    verdict = result["scenarios"][scenario]
    assert verdict["wrong"] == verdict["unknown"] == verdict["left"] == 0
    assert result["async"] is asynchronous
    assert result["retired_now"] == 0
    if scenario == "preempt":
        assert result["preemptions"] > 0
    elif scenario != "reset_in_flight" and not scenario.startswith("abort"):
        assert verdict["right"] >= 39


@pytest.mark.parametrize("vllm", NOTICES)
def test_without_its_references_the_connector_ends_the_engine(fences, vllm):
    """The references are needed: without them a block that it has stored is another's."""
    with pytest.raises(AssertionError, match="_process_store_completion"):
        fences(vllm).run_simple("finish_in_flight", "eager", unpinned=True)


@pytest.mark.parametrize("vllm", [vllm for vllm in RELEASES if vllm not in NOTICES])
def test_without_its_references_blocks_are_lost(fences, vllm):
    result = fences(vllm).run_simple("finish_in_flight", "eager", unpinned=True)
    assert result["scenarios"]["finish_in_flight"]["wrong"] > 0
