"""A sparse file: address space, whose ranges are memory once they are committed."""

from __future__ import annotations

import ctypes
import errno
import os

# Of one call: the kernel holds a lock for each, and a signal has it start again.
PIECE = 8 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*, in linux/falloc.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Memory:
    """The ranges of a file in memory (tmpfs).

    A range that is not committed must not be touched: reading a hole through a mapping
    allocates its page, which nobody has counted.

    Args:
        file: its descriptor, which is closed with this object.
    """

    def __init__(self, file: int) -> None:
        self._file = file

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
            for start in range(offset, offset + size, PIECE):
                _fallocate(self._file, 0, start, min(PIECE, offset + size - start))
        except OSError:
            self.punch(offset, size)
            raise

    def punch(self, offset: int, size: int) -> None:
        """Give the pages of a range back to the kernel."""
        _fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, offset, size)

    def close(self) -> None:
        """Close the file, whose memory goes with its last user."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _fallocate(file: int, mode: int, offset: int, size: int) -> None:
    # os.posix_fallocate writes zeros where the kernel refuses, and has no mode.
    while _libc.fallocate(file, mode, offset, size) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
