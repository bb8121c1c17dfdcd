"""Where a process comes from, and telling it from a later one with the same pid."""

from __future__ import annotations

import multiprocessing
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot; None if it does not run.

    A process that has ended, and that its parent has not waited for, does not run.

    psutil only has the wall-clock time, which changes when the clock is set.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Fields 3 and 22, counted after the command, which may contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def started_by_multiprocessing() -> bool:
    """Return whether Python's multiprocessing started this process, as vLLM starts its own."""
    # A spawned child has no parent_process() yet while it unpickles its target.
    current = multiprocessing.current_process()
    return multiprocessing.parent_process() is not None or getattr(current, "_inheriting", False)
