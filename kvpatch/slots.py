"""Where the blocks of a transfer lie in the CPU tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Slot:
    """Where a block of a group lies in the CPU tier: its row, and the place in the row."""

    group: int
    row: int
    inside: int


def slots(device: Any, tier: Any, blocks_per_chunk: int) -> Iterator[tuple[int, Slot]]:
    """Pair the device blocks of a transfer with their slots of the tier.

    A group's first block may lie in the middle of a chunk: ``block_indices`` gives its
    position in the request.

    Args:
        device: vLLM's ``GPULoadStoreSpec``.
        tier: the spec of the other side, with one id a chunk.
        blocks_per_chunk: device blocks in one block of the tier.
    """
    device_at = tier_at = 0
    for group, (count, first) in enumerate(
        zip(device.group_sizes, device.block_indices, strict=True)
    ):
        skip = first % blocks_per_chunk
        for position in range(count):
            chunk, inside = divmod(skip + position, blocks_per_chunk)
            row = int(tier.block_ids[tier_at + chunk])
            yield int(device.block_ids[device_at + position]), Slot(group, row, inside)
        device_at += count
        tier_at += -(-(skip + count) // blocks_per_chunk) if count else 0
