"""SimpleCPUOffloadConnector's own fence on Model Runner V2, as the engine lane shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Device
from test_fence import SCHEDULING
from test_simple import MODES, TOGETHER, SimpleFences

RELEASES = ("0.30.0", "0.32.0")


@pytest.fixture(scope="module")
def fences(
    models: Callable[[str], Path], device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], SimpleFences]:
    made = {
        vllm: SimpleFences(models, device, tmp_path_factory.mktemp("fence"), vllm, "v2")
        for vllm in RELEASES
    }
    return made.__getitem__


@pytest.mark.parametrize("vllm", RELEASES)
@SCHEDULING
@MODES
@pytest.mark.parametrize("scenario", [*TOGETHER, "preempt"])
def test_every_stored_block_is_right_and_nothing_is_left(
    fences: Callable[[str], SimpleFences], scenario: str, mode: str, asynchronous: bool, vllm: str
) -> None:
    result = fences(vllm).run_simple(scenario, mode, asynchronous)
    verdict = result["scenarios"][scenario]
    assert verdict["wrong"] == verdict["unknown"] == verdict["left"] == 0
    assert result["async"] is asynchronous
    assert result["retired_now"] == 0
    if scenario == "preempt":
        assert result["preemptions"] > 0
    elif scenario != "reset_in_flight" and not scenario.startswith("abort"):
        assert verdict["right"] >= 39


@pytest.mark.parametrize("vllm", RELEASES)
def test_without_its_references_the_connector_ends_the_engine(
    fences: Callable[[str], SimpleFences], vllm: str
) -> None:
    """The references are needed: without them a block that it has stored is another's."""
    with pytest.raises(AssertionError, match="_process_store_completion"):
        fences(vllm).run_simple("finish_in_flight", "eager", unpinned=True)
