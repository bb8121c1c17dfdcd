"""kvcached's pool in /dev/shm: 24 bytes with the limit and the usage of an engine.

kvcached makes the file sparse and open to all readers, then maps it. A full /dev/shm ends the
engine with SIGBUS, and whoever may read the file can lock it, which kvcached waits for in every
map and unmap. kvcached uses a file that is there, so that it is made here first.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvpatch import claims, private
from kvpatch.environ import KVCACHED_IPC_NAME

SIZE = 24  # three int64, see MemInfoStruct in kvcached's mem_info_tracker.hpp


def make(name: str) -> None:
    """Make the pool of a claimed name, with its memory, for this user only, or refuse."""
    path = claims.BASE / name
    try:
        _drop_if_open(path)
        with private.opened(path) as file:
            os.posix_fallocate(file, 0, SIZE)
    except private.Unsafe as error:
        raise error.refusal(
            "its owner could change this engine's page limit, or stop it by a lock",
            f"set another {KVCACHED_IPC_NAME}",
        ) from error
    except OSError as error:
        raise claims.no_room(path, error) from error


def _drop_if_open(path: Path) -> None:
    """Remove the pool that an engine without kvpatch left: others may have it open and locked."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    private.check_file(path, status, closed=False)
    if status.st_mode & 0o077:
        path.unlink()
