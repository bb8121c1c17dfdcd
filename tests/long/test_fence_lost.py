"""Each interleaving that the fence is for loses blocks without it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engines.fences import LOST_WITHOUT, Fences
from harness.engines.runs import Device


@pytest.fixture(scope="module")
def fences(
    models: Callable[[str], Path], device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Fences:
    return Fences(models, device, tmp_path_factory.mktemp("fence"))


@pytest.mark.parametrize(
    ("scenario", "asynchronous"),
    # From 0.30 on the connector does not store what leaves a sliding window in the same step.
    [
        (name, mode)
        for mode, names in LOST_WITHOUT.items()
        for name in sorted(names - {"window_skip"})
    ],
)
def test_without_the_fence_blocks_are_lost(
    fences: Fences, scenario: str, asynchronous: bool
) -> None:
    result = fences.run(scenario, asynchronous, fenced=False)
    assert result["async"] is asynchronous
    assert result["scenarios"][scenario]["wrong"] > 0
