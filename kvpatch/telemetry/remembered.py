"""Blocks that an engine has computed: which of them a tier without a limit would still have.

A table of fixed size with one place for each hash, where a later one takes the place of an earlier
one: no lists, nothing is moved, and what is forgotten makes the answer smaller, never larger. A
block costs about a microsecond.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

# 16.8 million tokens at 16 a block. 8 MiB, of which the kernel gives what is written.
SLOTS = 1 << 20


class Remembered:
    """Hashes of blocks, by their first 8 bytes, in a number of slots that is a power of two."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._last = slots - 1
        self.forget()

    def forget(self) -> None:
        """Remember nothing."""
        self._slots = memoryview(mmap.mmap(-1, 8 * (self._last + 1))).cast("Q")

    def add(self, hashes: Iterable[bytes]) -> None:
        """Remember blocks."""
        slots, last = self._slots, self._last
        for one in hashes:
            number = int.from_bytes(one[:8], "little")
            slots[number & last] = number

    def prefix(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks at the beginning of a prompt were computed.

        A block's hash is one of all before it: they were computed though others took their places.
        """
        slots, last = self._slots, self._last
        for count in range(len(hashes), 0, -1):
            number = int.from_bytes(hashes[count - 1][:8], "little")
            if slots[number & last] == number:
                return count
        return 0
