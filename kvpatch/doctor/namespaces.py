"""Which processes cannot be seen from here.

Containers may share /dev/shm (``docker --ipc=host``, the containers of a pod), and have process
ids and abstract sockets of their own: what looks dead from outside may be alive in one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
INITIAL = "pid:[4026531836]"  # the machine's own, PROC_PID_INIT_INO of Linux


def all_are_seen(folder: Path, uid: int, proc: Path = PROC) -> bool:
    """Whether every process that may use files of ``uid`` in ``folder`` has its own id here too."""
    if os.readlink(proc / "self/ns/pid") != INITIAL:  # noqa: PTH115 - it is no path
        return False
    device = folder.stat().st_dev
    return not any(_may_use(process, folder, device, uid) for process in _in_containers(proc))


def _in_containers(proc: Path) -> Iterator[Path]:
    """Yield the processes that have another id where they run."""
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        try:
            status = (process / "status").read_text()
        except OSError:  # it exited
            continue
        ids = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
        if ids and len(ids[0]) > 1:  # one for each namespace that it is in
            yield process


def _may_use(process: Path, folder: Path, device: int, uid: int) -> bool:
    inside = Path(f"{process}/root{folder}")
    try:
        return inside.stat().st_dev == device
    except PermissionError:
        pass
    except OSError:  # it exited, or has no such folder
        return False
    try:
        return process.stat().st_uid == uid
    except OSError:
        return False
