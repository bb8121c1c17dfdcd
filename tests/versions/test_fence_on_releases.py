"""The fence on later releases with Model Runner V2: the demonstrations of the engine lane."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import Device
from test_fence import ALONE, BOTH_LOADED, LOST_WITHOUT, SCHEDULING, TOGETHER, Fences

RELEASES = ("0.30.0", "0.32.0")
EVERY = pytest.mark.parametrize("scenario", [*TOGETHER, *ALONE, BOTH_LOADED])
ON = pytest.mark.parametrize("vllm", RELEASES)


@pytest.fixture(scope="module")
def fences(
    models: Callable[[str], Path], device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Fences]:
    made = {
        vllm: Fences(models, device, tmp_path_factory.mktemp("fence"), vllm, "v2")
        for vllm in RELEASES
    }
    return made.__getitem__


@ON
@SCHEDULING
@EVERY
def test_with_the_fence_every_stored_block_is_right(
    fences: Callable[[str], Fences], vllm: str, scenario: str, asynchronous: bool
) -> None:
    result = fences(vllm).run(scenario, asynchronous, fenced=True)
    verdict: dict[str, Any] = result["scenarios"][scenario]
    assert verdict["right"] >= 40
    assert verdict["wrong"] == verdict["unknown"] == 0
    assert result["async"] is asynchronous
    assert result["held_now"] == result["retired_now"] == 0
    assert result["counters"]["released"] > 0
    if scenario == "preempt":
        assert result["preemptions"] > 0


@ON
def test_with_two_ranks_every_stored_block_is_right(
    fences: Callable[[str], Fences], vllm: str
) -> None:
    result = fences(vllm).run("finish", asynchronous=False, fenced=True, ranks=2)
    verdict = result["scenarios"]["finish"]
    assert verdict["right"] >= 2 * 70
    assert verdict["wrong"] == verdict["unknown"] == 0
    assert result["held_now"] == result["retired_now"] == 0


@ON
@pytest.mark.parametrize(
    ("scenario", "asynchronous"),
    [(name, mode) for mode, names in LOST_WITHOUT.items() for name in sorted(names)],
)
def test_without_the_fence_blocks_are_lost(
    fences: Callable[[str], Fences], vllm: str, scenario: str, asynchronous: bool
) -> None:
    result = fences(vllm).run(scenario, asynchronous, fenced=False)
    assert result["scenarios"][scenario]["wrong"] > 0
