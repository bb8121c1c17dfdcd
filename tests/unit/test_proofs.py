"""What the tests prove is written down, and what fails is not proved."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEST = """
from types import SimpleNamespace
import pytest

@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("oracle", ["tokens", "bytes"])
def test_it(proves, contiguous, oracle):
    proves("Offloading", SimpleNamespace(
        vllm="0.28.0", runner="v2", contiguous=contiguous, model="llama"))
    assert contiguous or oracle == "tokens"
"""
METADATA = """
from importlib import metadata
metadata.version = {"kvcached": "0.1.6", "kvpatch": "0.1.0", "torch": "2.13.0"}.__getitem__
"""


@pytest.fixture
def recorded(run, tmp_path):
    """Run the tests of a copy and return what was written down."""

    def recorded(*options: str) -> dict[str, Any]:
        copy = tmp_path / "copy"
        for name in ("kvpatch", "scripts/matrix_lib"):
            ignored = shutil.ignore_patterns("__pycache__", "vllm-*-kvcached-*.json")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        lane = copy / "tests/engine"
        lane.mkdir(parents=True)
        (lane / "test_it.py").write_text(TEST)
        (lane / "conftest.py").write_text(METADATA)
        for name in ("tests/conftest.py", "tests/proofs.py", "pyproject.toml"):
            shutil.copy(ROOT / name, copy / name)
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", copy)
        run(sys.executable, *command, "-c", copy / "pyproject.toml", lane, *options)
        path = copy / "kvpatch/matrix/data/engine/vllm-0.28.0-kvcached-0.1.6.json"
        return json.loads(path.read_text()) if path.exists() else {}

    return recorded


def test_a_cell_is_right_when_every_test_that_names_it_passed(recorded):
    made = recorded("--record")
    assert {run["layout"]: run["right"] for run in made["runs"]} == {
        "contiguous": True,
        "non-contiguous": False,
    }
    assert {(run["connector"], run["runner"], run["model"]) for run in made["runs"]} == {
        ("Offloading", "V2", "full attention")
    }
    assert all(len(run["tests"]) == 2 for run in made["runs"])


def test_without_being_asked_nothing_is_written(recorded):
    assert recorded() == {}
