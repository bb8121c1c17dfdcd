"""Distinguishing a process from a later one with the same pid."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot; None if it does not exist.

    psutil only has the wall-clock time, which changes when the clock is set.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Field 22, counted after the command, which may contain spaces and parentheses.
    return int(stat.rpartition(")")[2].split()[19])
