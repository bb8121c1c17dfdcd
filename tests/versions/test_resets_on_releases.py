"""Resets of OffloadingConnector on the scheduler's classes of older releases."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness import releases
from harness.engines.runs import python_of


@pytest.mark.parametrize("vllm", releases.between("0.22", before=releases.newest()))
def test_the_schedulers_with_kvpatchs_rows(vllm: str) -> None:
    """The engine lane's tests of these classes, with another vLLM."""
    file = Path(__file__).parents[1] / "engine/test_resets.py"
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
