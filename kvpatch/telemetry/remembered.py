"""Blocks that an engine has computed: which of them a tier without a limit would still have.

A table of fixed size with one place for each hash, where a later one takes the place of an earlier
one: no lists, nothing is moved, and what is forgotten makes the answer smaller, never larger.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

SLOTS = (
    1 << 20
)  # 8 MiB, of which the kernel gives what is written; 16.8 million tokens of 16 a block


class Remembered:
    """Hashes of blocks, by their first 8 bytes.

    Args:
        slots: how many there is room for, a power of two.
    """

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

    def leading(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks of a prefix are remembered, up to the first that is not."""
        slots, last = self._slots, self._last
        for count, one in enumerate(hashes):
            number = int.from_bytes(one[:8], "little")
            if slots[number & last] != number:
                return count
        return len(hashes)
