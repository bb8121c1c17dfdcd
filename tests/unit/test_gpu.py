"""scripts/gpu without a GPU: it is skipped with a reason, and refuses unknown stages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.gpu import run as gpu

GPU = Path(__file__).parents[2] / "scripts/gpu"


@pytest.fixture
def without_gpu(run, tmp_path):
    """The command where there is no nvidia-smi."""

    def without_gpu(*words: str):
        output = tmp_path / "out"
        return run(sys.executable, GPU, "--output", output, *words, PATH=tmp_path), output

    return without_gpu


def test_without_a_gpu_it_is_skipped(without_gpu):
    done, output = without_gpu()
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("skipped: this machine has no NVIDIA GPU.")
    assert not output.exists()


@pytest.mark.parametrize("words", [["speed"], ["arms", "--dry"]])
def test_an_unknown_stage_is_refused(without_gpu, words):
    done, _ = without_gpu(*words)
    assert done.code == 2
    assert f"scripts/gpu: error: {words[0]} is not one of" in done.err


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"blocks": 8, "equal": 8}, False),
        ({"blocks": 8, "equal": 7}, True),
        ({"gb_per_second": 1.0}, False),
        ({"mapped_bytes": {"before": 4, "under the copy": 4, "after": 2}}, False),
        ({"mapped_bytes": {"before": 4, "under the copy": 2, "after": 2}}, True),
    ],
)
def test_a_wrong_row_is_found(row, wrong):
    assert gpu.wrong(row) is wrong
