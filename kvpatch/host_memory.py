"""The memory that a CPU tier could take: in /dev/shm, in the container and in the machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from kvpatch import cgroup
from kvpatch.environ import OUR_IPC_NAME
from kvpatch.process import started_by_multiprocessing

SHM = Path("/dev/shm")


class HostMemory(NamedTuple):
    """Free memory, in bytes."""

    shm: int | None  # in /dev/shm; None if it cannot be read
    container: int | None  # what its memory limit leaves; None without one
    available: int  # of the machine, without swapping
    swap: int

    @property
    def free(self) -> int:
        """What can be taken outside of /dev/shm without swapping."""
        return self.available if self.container is None else min(self.available, self.container)

    @property
    def free_in_shm(self) -> int:
        """What can be taken of /dev/shm, whose memory can be swapped out."""
        free = self.free + self.swap
        return free if self.shm is None else min(free, self.shm)


def here(shm: Path = SHM) -> HostMemory:
    """Return the free memory of this process's machine and container."""
    import psutil  # here, because a process without an offloading engine needs none of it

    limit = cgroup.tightest()
    return HostMemory(
        shm=shm_free(shm),
        container=limit and limit.free,
        available=int(psutil.virtual_memory().available),
        swap=int(psutil.swap_memory().free),
    )


def shm_free(folder: Path = SHM) -> int | None:
    """Return the free bytes of /dev/shm, or None if it cannot be read."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def reader(environment: Mapping[str, str] = os.environ) -> Reader | None:
    """Return ``here`` for a process that may start an engine, else None.

    vLLM's own processes have a checked configuration, and the tier a part of the memory by then.
    They inherit kvpatch's name for kvcached; a forked one is told by its pid.
    """
    if environment.get(OUR_IPC_NAME.name) and started_by_multiprocessing():
        return None
    pid = os.getpid()
    return lambda: here() if os.getpid() == pid else None


Reader = Callable[[], HostMemory | None]
