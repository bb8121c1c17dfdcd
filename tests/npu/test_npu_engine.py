"""vllm-ascend's engines on the emulated NPU: static memory, and kvcached's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import ascend
from harness.matrix import npu
from kvpatch.patches.ascend import ran


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module", params=ascend.RELEASES)
def static(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """vllm-ascend as it is, with its connector on its own memory."""
    return npu.served(request.param, folder, "eager", "0")


@pytest.fixture(scope="module", params=ascend.RELEASES)
def elastic(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """The same on kvcached's memory."""
    return npu.served(request.param, folder, "eager", "1")


def test_the_emulated_npu_computes_what_the_cpu_does(static: dict[str, Any]) -> None:
    assert static["rounds"][0]["tokens"] == static["expected"]


def test_static_memory_is_served_back_from_the_tier(static: dict[str, Any]) -> None:
    assert [one["cached"] for one in static["rounds"]] == npu.SERVED_BACK
    assert all(one["tokens"] == static["expected"] for one in static["rounds"])


def test_elastic_memory_has_the_tokens_of_static_memory(
    static: dict[str, Any], elastic: dict[str, Any]
) -> None:
    assert all(one["tokens"] == static["expected"] for one in elastic["rounds"])


def test_elastic_memory_is_served_back_from_the_tier(elastic: dict[str, Any]) -> None:
    assert [one["emptied"] for one in elastic["rounds"]] == [True] * 3
    assert [one["cached"] for one in elastic["rounds"]] == npu.SERVED_BACK


def test_the_cell_of_the_matrix_is_right(static: dict[str, Any], elastic: dict[str, Any]) -> None:
    assert [what for what, right in npu.judged(static, elastic).items() if not right] == []


def test_the_settings_are_those_that_start(elastic: dict[str, Any]) -> None:
    assert elastic["settings"].keys() == ran.RAN.keys()
