"""vllm-ascend's engines on the emulated NPU: static memory, and kvcached's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness import ascend
from harness.models import make_model

STORED = [0, 128, 384, 128]  # the whole blocks of prompts of 30, 200, 400 and 129 tokens


@cache
def served(release: str, folder: Path, options: str, kvpatch: str) -> dict[str, Any]:
    """What one engine served, on a device of its own."""
    ledger = folder / f"ledger{kvpatch}-{abs(hash(options))}"
    ledger.mkdir()
    model = make_model(folder / "llama")
    return ascend.drive(release, ledger, "ascend_engine", str(model), options, KVPATCH=kvpatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module", params=ascend.RELEASES)
def static(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """vllm-ascend as it is, with its connector on its own memory."""
    return served(request.param, folder, '{"offload": "eager", "expected": true}', "0")


@pytest.fixture(scope="module", params=ascend.RELEASES)
def elastic(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """The same on kvcached's memory."""
    return served(request.param, folder, '{"offload": "eager"}', "1")


def test_the_emulated_npu_computes_what_the_cpu_does(static: dict[str, Any]) -> None:
    assert static["rounds"][0]["tokens"] == static["expected"]


def test_static_memory_is_served_back_from_the_tier(static: dict[str, Any]) -> None:
    assert [one["cached"] for one in static["rounds"]] == [[0] * 4, STORED, STORED]
    assert all(one["tokens"] == static["expected"] for one in static["rounds"])


def test_elastic_memory_has_the_tokens_of_static_memory(
    static: dict[str, Any], elastic: dict[str, Any]
) -> None:
    assert all(one["tokens"] == static["expected"] for one in elastic["rounds"])


def test_elastic_memory_is_served_back_from_the_tier(elastic: dict[str, Any]) -> None:
    assert [one["emptied"] for one in elastic["rounds"]] == [True] * 3
    assert [one["cached"] for one in elastic["rounds"]] == [[0] * 4, STORED, STORED]
