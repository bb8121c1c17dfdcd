"""Where vLLM's offloading classes are in each release, and how it counts blocks of a CPU tier.

From vLLM 0.30 on a block of the CPU tier, a row of device blocks, is called a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvpatch import claims

_HOMES = ("base", "spec", "worker.worker", "cpu.common", "mediums", "cpu.spec", "cpu")


def find(name: str) -> Any:
    """Return a class of ``vllm.v1.kv_offload``, which moved up to vLLM 0.25, or ImportError."""
    for home in _HOMES:
        try:
            module = import_module(f"vllm.v1.kv_offload.{home}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"vllm.v1.kv_offload has no {name}")


def device_type() -> str:
    """Return the device of the KV cache for ``Facts.device``: ``cuda`` also for ROCm."""
    from vllm.platforms import current_platform

    return "cuda" if current_platform.is_cuda_alike() else str(current_platform.device_type)


def region_path(engine_id: str) -> Path:
    """Return the file of vLLM's ``SharedOffloadRegion``, whose id is random up to 0.25."""
    return claims.BASE / f"vllm_offload_{engine_id}.mmap"


def chunks_of(owner: Any, name: str = "num_{}") -> int:
    """Return a count of chunks of a spec or manager, called blocks up to vLLM 0.29.

    ``name`` is that of the attribute, with ``{}`` for either word.
    """
    later = name.format("chunks")
    return int(getattr(owner, later if hasattr(owner, later) else name.format("blocks")))


def blocks_per_chunk(spec: Any) -> int:
    """Return the device blocks per chunk of a spec's CPU tier."""
    for name in ("blocks_per_chunk", "block_size_factor"):  # the latter up to 0.25
        if hasattr(spec, name):
            return int(getattr(spec, name))
    return int(spec.offloaded_block_size // spec.gpu_block_size)  # up to 0.17


@cache
def lookup_results() -> tuple[Any, tuple[Any, ...]]:
    """Return the result of a tier's lookup for a miss, and those for a block to wait for."""
    try:
        from vllm.v1.kv_offload.base import LookupResult
    except ImportError:  # up to 0.24
        return False, (None,)
    return LookupResult.MISS, (LookupResult.RETRY, LookupResult.HIT_PENDING)


class Place(NamedTuple):
    """The place of a group's block in the CPU tier: its chunk, and the position inside it."""

    group: int
    chunk: int
    inside: int


def places(device: Any, tier: Any, blocks_per_chunk: int) -> Iterator[tuple[int, Place]]:
    """Pair the device blocks of a transfer with their places in the CPU tier.

    A group's first block may be in the middle of a chunk: ``block_indices`` has its position in the
    request. ``tier`` is the spec of the other side, with one id per chunk.
    """
    device_at = tier_at = 0
    for group, (count, first) in enumerate(
        zip(device.group_sizes, device.block_indices, strict=True)
    ):
        skip = first % blocks_per_chunk
        for position in range(count):
            chunk, inside = divmod(skip + position, blocks_per_chunk)
            row = int(tier.block_ids[tier_at + chunk])
            yield int(device.block_ids[device_at + position]), Place(group, row, inside)
        device_at += count
        tier_at += -(-(skip + count) // blocks_per_chunk) if count else 0


def by_group(device: Any, per_row: int) -> Any:
    """Return a ``GPULoadStoreSpec`` with the groups of its blocks and where each begins.

    Up to 0.18 there is one group, and a transfer ends with a whole row of the CPU tier; up
    to 0.20 that is so where the beginnings are left out.
    """
    sizes = getattr(device, "group_sizes", None) or (len(device.block_ids),)
    first = getattr(device, "block_indices", None) or [-size % per_row for size in sizes]
    return SimpleNamespace(block_ids=device.block_ids, group_sizes=sizes, block_indices=first)
