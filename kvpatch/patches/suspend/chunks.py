"""Which blocks a tier stores under one name.

With ``blocks_per_chunk`` a tier has chunks of as many blocks: those that follow each other in a
request from its beginning on, under the key of the last one. A block's hash is made of the one
before it and does not say which that is, so that it is noted while a request with both is there.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

_LEAST = 4096  # chunks that are kept without a look at whether their blocks are still there


class Chunks:
    """The chunks that are known, by the keys of their blocks; kept on a ``Spill``."""

    def __init__(self, size: int = 1) -> None:
        self.size = size  # blocks of a chunk; with 1 a block is its own, and nothing is noted
        self.noted: dict[str, int] = {}  # by request, the blocks whose chunks are known
        self._blocks: dict[bytes, tuple[bytes, ...]] = {}
        self._of: dict[bytes, tuple[bytes, ...]] = {}  # requests part within a chunk
        self._full = _LEAST

    def add(self, blocks: Sequence[bytes]) -> None:
        """Note a chunk by the keys of its blocks, in their order."""
        chunk = blocks[-1]
        if chunk not in self._blocks:
            self._blocks[chunk] = tuple(blocks)
            for key in blocks:
                self._of[key] = (*self._of.get(key, ()), chunk)

    def of(self, key: bytes) -> tuple[bytes, ...]:
        """Return the chunks that a block is part of; none if it is of one that is not full."""
        return (key,) if self.size == 1 else self._of.get(key, ())

    def blocks(self, chunk: bytes) -> tuple[bytes, ...]:
        """Return the keys of a chunk's blocks, in their order."""
        return (chunk,) if self.size == 1 else self._blocks[chunk]

    @property
    def full(self) -> bool:
        """Whether so many are known that those without a block should be forgotten."""
        return len(self._blocks) > self._full

    def forget(self, there: Container[bytes]) -> None:
        """Forget the chunks of which no block is there; others may have to be noted again."""
        known = [blocks for blocks in self._blocks.values() if any(map(there.__contains__, blocks))]
        self._blocks, self._of = {}, {}
        for blocks in known:
            self.add(blocks)
        self._full = max(_LEAST, 2 * len(known))
