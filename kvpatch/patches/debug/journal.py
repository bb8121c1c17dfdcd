"""What a worker has checked so far, for ``kvpatch verify``, in a file that a kill leaves complete.

Imported only where ``KVPATCH_VERIFY`` names the folder.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path

NAMES = ("stored", "loaded", "unverified", "named")
PREFIX = "audit-"
_COUNTS = struct.Struct(f"={len(NAMES)}q")


class Journal:
    """The file of one audit, in the folder of a run."""

    def __init__(self, folder: Path) -> None:
        number = sum(1 for _ in folder.glob(f"{PREFIX}{os.getpid()}-*"))
        path = folder / f"{PREFIX}{os.getpid()}-{number}"
        with path.open("x+b") as file:
            file.truncate(_COUNTS.size)
            self._map = mmap.mmap(file.fileno(), _COUNTS.size)

    def write(self, checked: Mapping[str, int]) -> None:
        """Note what was checked."""
        _COUNTS.pack_into(self._map, 0, *(checked.get(name, 0) for name in NAMES))


def read(folder: Path) -> list[dict[str, int]]:
    """Return what each audit of a run has checked: one for each worker and connector."""
    return [
        dict(zip(NAMES, _COUNTS.unpack(path.read_bytes()), strict=True))
        for path in sorted(folder.glob(f"{PREFIX}*"))
    ]
