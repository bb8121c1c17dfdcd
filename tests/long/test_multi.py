"""OffloadingConnector inside vLLM's MultiConnector: right tokens, and the fence holds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engines.fences import Fences
from harness.engines.multi import INSIDE, compare_simple_inside
from harness.engines.runs import Run


# Which connector is beside it is by the mode; the layouts are cells of the matrix.
@pytest.mark.parametrize(
    ("mode", "contiguous"),
    [("eager", False), ("lazy", True)],
    ids=["eager-non-contiguous", "lazy-contiguous"],
)
def test_simple_is_right_in_it_too(engine, serve, mode, contiguous):
    compare_simple_inside(Run(contiguous=contiguous, simple=mode), engine, serve)


class DiskFences(Fences):
    """One interleaving of the fence's, inside a MultiConnector and with a disk behind."""

    inside = INSIDE

    def on_disk(self, disk: Path, fenced: bool) -> tuple[dict[str, int], dict[str, Any]]:
        """How many blocks on disk are right and wrong after the scenario, and its result."""
        self.tiers = (str(disk),)
        run, job = self.prepare(("finish",), asynchronous=False, ranks=1)
        job |= {"may_hold": True, "revert": [] if fenced else ["fence.install"]}
        result = self.folder / f"{disk.name}.json"
        self._drive(job, run, result)
        truth = np.load(self.truth("llama", 1))
        verdict = {"right": 0, "wrong": 0}
        for file in disk.rglob("*.bin"):
            group = int(file.parent.name.rpartition("_g")[2])
            expected = truth[f"0:{file.stem}{group:08x}"]
            found = np.frombuffer(file.read_bytes(), dtype=np.float32, count=expected.size)
            same = np.allclose(found, expected, atol=1e-3, rtol=1e-3)
            verdict["right" if same else "wrong"] += 1
        return verdict, json.loads(result.read_text())


def test_with_the_fence_no_wrong_block_reaches_the_disk(fences, tmp_path):
    verdict, result = fences(DiskFences).on_disk(tmp_path / "fenced", fenced=True)
    assert verdict["right"] >= 40
    assert verdict["wrong"] == 0
    assert result["scenarios"]["finish"]["wrong"] == 0
    assert result["counters"]["released"] > 0
    assert result["held_now"] == result["retired_now"] == 0


def test_without_the_fence_wrong_blocks_reach_the_disk(fences, tmp_path):
    verdict, _ = fences(DiskFences).on_disk(tmp_path / "bare", fenced=False)
    assert verdict["wrong"] > 0
