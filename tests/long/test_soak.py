"""The two-minute cut of scripts/soak: everything that frees blocks, in debug mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
def test_two_minutes_leave_nothing_wrong_and_nothing_behind(tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    ended = subprocess.run(
        [sys.executable, "-m", "harness.soak", "--minutes", "2", "--report", report],
        env=dict(os.environ, KVPATCH="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    synchronous, asynchronous = json.loads(report.read_text())["runs"]
    assert (synchronous["asynchronous"], asynchronous["asynchronous"]) == (False, True)
    for run in (synchronous, asynchronous):
        assert run["wrong"] == []
        assert set(run["left"].values()) == {0}
        (checked,) = run["checked"]
        assert checked["stored"] > 0
        assert checked["loaded"] > 0
        assert run["fence"]["released"] > 0
        assert run["counts"]["neighbours"] > 0
        assert run["counts"]["holds"] > 0
