"""Tiers on later releases: a restart, other layouts, and the faults of disks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from runs import HERE as ENGINE_LANE
from runs import Finished, Run, python_of
from test_tiers import (
    APART,
    SMALL,
    Engine,
    Serve,
    answers,
    assert_comes_back,
    assert_plain,
    hits,
    on,
    serve,
)

__all__ = ["serve"]

NEWEST = {"vllm": "0.32.0", "runner": "v2"}


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Finished:
    """Plain vLLM of the newest release, which the first prompts are asked."""
    return engine(Run(kvpatch=False, offload=False, rounds=(str(APART),), **NEWEST))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def filled(serve: Serve, disk: Path) -> Finished:
    """The first engine on the disk, contiguous; each prompt twice."""
    return serve(on(disk, **NEWEST), times=2, watch=True, engine=SMALL["llama"])


def test_prompts_the_cpu_tier_evicted_come_back_from_disk(
    filled: Finished, plain: Finished
) -> None:
    assert_comes_back(filled, plain)


def test_a_fresh_process_is_served_from_the_disk(
    filled: Finished, serve: Serve, disk: Path, plain: Finished
) -> None:
    answers(filled)
    restarted = answers(serve(on(disk, **NEWEST)))
    assert_plain(restarted, plain)
    assert hits(restarted) == [640] * APART


@pytest.mark.parametrize(
    "other", [{"contiguous": False}, {"kvpatch": False}], ids=["non-contiguous", "plain vLLM"]
)
def test_an_engine_that_means_other_bytes_finds_nothing_on_the_same_disk(
    filled: Finished, serve: Serve, disk: Path, plain: Finished, other: dict[str, bool]
) -> None:
    answers(filled)
    before = {folder.name for folder in disk.iterdir()}
    records = answers(serve(on(disk, **NEWEST, **other)))
    assert_plain(records, plain)
    assert hits(records) == [0] * APART
    assert {folder.name for folder in disk.iterdir()} > before


@pytest.mark.parametrize("vllm", ["0.29.0", "0.30.0", "0.31.0", "0.32.0"])
def test_the_tier_classes_with_kvpatchs_rows(vllm: str) -> None:
    """The engine lane's tests of vLLM's own tier classes, with another vLLM."""
    file = ENGINE_LANE / "test_tier_classes.py"
    ended = subprocess.run(
        [python_of(vllm), "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout
