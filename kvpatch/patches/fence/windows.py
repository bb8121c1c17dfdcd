"""The blocks that requests with sliding windows know, found without a walk over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, islice

_SPAN = 64  # blocks that are found together; nothing but costs depends on it


class KnownBlocks(list[int]):
    """In the place of vLLM's ``RequestGroupState.block_ids`` of a group with a window.

    In every supported release vLLM appends to such a list, clears it, or sets one of it to 0.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        super().__init__(blocks)
        self._indexed = 0
        self._positions: dict[int, list[range]] = {}  # by span of blocks

    def clear(self) -> None:
        """As a list's."""
        super().clear()
        self._indexed = 0
        self._positions.clear()

    def catch_up(self) -> None:
        """Remember where the blocks are that were appended since the last call."""
        if self._indexed == len(self):
            return
        for span, blocks in groupby(islice(self, self._indexed, None), key=span_of):
            begin = self._indexed
            self._indexed += sum(1 for _ in blocks)
            self._positions.setdefault(span, []).append(range(begin, self._indexed))

    def forget(self, gone: set[int], spans: set[int]) -> None:
        """Set the blocks that are gone, which are in these spans, to 0, the null block."""
        for span in self._positions.keys() & spans:
            left = []
            for positions in self._positions.pop(span):
                for position in positions:
                    if self[position] in gone:
                        self[position] = 0
                if any(self[position] for position in positions):
                    left.append(positions)
            if left:
                self._positions[span] = left


def span_of(block: int) -> int:
    """Return the span that a block is in; the null block is in none of the others'."""
    return (block + _SPAN - 1) // _SPAN
