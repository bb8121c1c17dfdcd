"""Where a tier's chunks are in its file, if each rank has them region by region.

SimpleCPUOffloadConnector has a dense tensor of CPU blocks for each region of the KV cache, on each
rank. An extent is then a range of each of them. Everything else of the pool counts chunks as if
they were one behind the other: offsets and sizes there are nominal, and become ranges here.

The CPU block 0 is vLLM's null block, which is never copied: chunk ``n`` is block ``n + 1``, and
block 0 is address space without memory.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from math import gcd, lcm


class Stripes:
    """The layout of a tier's file.

    Args:
        blocks: CPU blocks of each rank, with the null block.
        regions: bytes of a block in each region, which are the same on every rank.
        ranks: how many.

    Attributes:
        chunk_bytes: of a block, in all regions of all ranks.
        multiple: as many chunks, or a multiple of them, begin and end at pages in every region.
        size: bytes of the file.
    """

    def __init__(self, blocks: int, regions: tuple[int, ...], ranks: int) -> None:
        self.blocks, self.regions = blocks, regions
        self.chunk_bytes = sum(regions) * ranks
        page = mmap.PAGESIZE
        self.multiple = lcm(*(page // gcd(page, size) for size in regions))
        self._first: list[int] = []  # of each region, where block 1 begins in the rank's part
        end = 0
        for size in regions:
            first = _up(end + size)
            self._first.append(first)
            end = first + (blocks - 1) * size
        self._of_rank = _up(end)
        self.size = self._of_rank * ranks
        self._ranks = range(ranks)

    def begin(self, rank: int, region: int) -> int:
        """Return where the null block of a region begins in the file."""
        return rank * self._of_rank + self._first[region] - self.regions[region]

    def ranges(self, offset: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the file, of all ranks, that a nominal range of whole chunks is."""
        for rank in self._ranks:
            yield from self.of_rank(rank, offset, size)

    def of_rank(self, rank: int, offset: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield those of one rank."""
        first, count = offset // self.chunk_bytes, size // self.chunk_bytes
        for region, block in enumerate(self.regions):
            yield self.begin(rank, region) + (first + 1) * block, count * block


def pack(regions: tuple[int, ...]) -> bytes:
    """Return the bytes of a block in each region as a worker tells them to its engine."""
    return struct.pack(f"<{len(regions)}Q", *regions)


def unpack(told: bytes) -> tuple[int, ...]:
    """Return what ``pack`` was given.

    Raises:
        struct.error: it is something else.
    """
    return struct.unpack(f"<{len(told) // 8}Q", told)


def _up(offset: int) -> int:
    return -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
