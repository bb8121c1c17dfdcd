"""A sparse file: address space, whose ranges are memory once they are committed."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable

# Of one call: the kernel holds a lock for each, and a signal has it start again.
PIECE = 8 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*, in linux/falloc.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

Ranges = Callable[[int, int], Iterable[tuple[int, int]]]


class Memory:
    """The ranges of a file in memory (tmpfs).

    A range that is not committed must not be touched: reading a hole through a mapping
    allocates its page, which nobody has counted.

    Args:
        file: its descriptor, which is closed with this object.
        ranges: the ranges of the file, of offset and size, that one of the tier is; the same
            one, if not given.
    """

    def __init__(self, file: int, ranges: Ranges | None = None) -> None:
        self._file = file
        self._ranges = ranges or _itself

    @property
    def committed(self) -> int:
        """The bytes of memory that the file has, as the kernel counts them."""
        return os.fstat(self._file).st_blocks * 512

    def commit(self, offset: int, size: int) -> None:
        """Allocate the pages of a range, all or none of them.

        Raises:
            OSError: there is no memory for it.
        """
        try:
            for first, length in self._ranges(offset, size):
                for start in range(first, first + length, PIECE):
                    _fallocate(self._file, 0, start, min(PIECE, first + length - start))
        except OSError:
            self.punch(offset, size)
            raise

    def punch(self, offset: int, size: int) -> None:
        """Give the pages of a range back to the kernel."""
        for first, length in self._ranges(offset, size):
            _fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, first, length)

    def close(self) -> None:
        """Close the file, whose memory goes with its last user."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _itself(offset: int, size: int) -> Iterable[tuple[int, int]]:
    return ((offset, size),)


def _fallocate(file: int, mode: int, offset: int, size: int) -> None:
    # os.posix_fallocate writes zeros where the kernel refuses, and has no mode.
    while _libc.fallocate(file, mode, offset, size) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
