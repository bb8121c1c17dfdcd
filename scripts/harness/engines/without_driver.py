"""Runs another driver with rows that were never applied, in the process that runs the engine.

A job of ``driver.py``, or of the driver that it names as ``driver``; ``without`` are the rows.
``Transaction.revert`` comes after kvcached has patched vllm, too late for the rows that change
how it does that, and not at all for a row that another one lies over.
"""

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness.engines.patience import PATIENCE
from kvpatch.patch import Feature, Patch

STARTED = "driver: started"  # as ``Engine`` says when it has been made
WAITS = "requests wait for ever"


def leave_out(rows: Iterable[str]) -> None:
    """Let features have no such rows; before vllm is imported."""
    left = frozenset(rows)
    every = Feature.at

    def at(self: Feature, release: Version) -> tuple[Patch, ...]:
        return tuple(row for row in every(self, release) if row.id not in left)

    Feature.at = at  # type: ignore[method-assign]


def end_when_stalled(_steps: int, seconds: float) -> None:
    """End an engine whose requests wait for ever."""
    if seconds >= PATIENCE:
        raise AssertionError(WAITS)


def main(job_path: str, result_path: str) -> None:
    """Run the driver of a job."""
    job = json.loads(Path(job_path).read_text())
    leave_out(job["without"])
    driver: Any = importlib.import_module(f"harness.engines.{job.get('driver', 'driver')}")
    if hasattr(driver, "stalled"):
        driver.stalled = end_when_stalled
    driver.main(job_path, result_path)
