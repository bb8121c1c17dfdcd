"""Processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.kills import LEFT


@pytest.mark.timeout(900)
@pytest.mark.fault(
    "kill -9 of the engine, a worker or the API server alone, in the middle of a store, a load, "
    "a promotion or a tier write (`python -m harness.kills`: 100 kills)",
    "the next server on the same disk serves plain vLLM's tokens, and nothing stays charged to the "
    "device; its start removes the CPU tier, the pool and the message queues of the dead from "
    "/dev/shm",
)
def test_servers_that_are_killed_leave_nothing_wrong_and_nothing_behind(tmp_path: Path) -> None:
    report = tmp_path / "kills.json"
    ended = subprocess.run(
        [sys.executable, "-m", "harness.kills", "--kills", "4", "--report", report],
        env=dict(os.environ, KVPATCH="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    totals = json.loads(report.read_text())["totals"]
    assert totals["kills"] == 4
    assert totals["answers_of_successors"] > 0
    assert totals["tokens_from_tiers_of_successors"] > 0
    assert (totals["wrong_answers"], totals["charged_bytes"]) == (0, 0)
    assert set(totals["left_in_shm"]) <= set(LEFT)
