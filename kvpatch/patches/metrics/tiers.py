"""What the tiers of an engine's connectors hold, and what happened on their disks.

A secondary tier of vLLM has no limit and counts nothing: what it holds, its file system knows, or
the ledger of a folder with a size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvpatch.patches.offloading import cpu_tier
from kvpatch.telemetry.disk import ERRORS, OUTCOMES, Disk
from kvpatch.upstream import connectors
from kvpatch.upstream.vllm_api import chunks_of

CPU = "cpu"


class Used(NamedTuple):
    """Blocks of a CPU tier; a block is what its connector counts there."""

    used: int
    total: int


def _offloading(connector: Any) -> Used:
    manager = connector.connector_scheduler.manager
    manager = getattr(manager, "primary_tier", manager)
    manager = getattr(manager, "_backing", manager)  # with store_threshold, 0.18 to 0.21
    store = getattr(manager, "backend", None)  # up to 0.18
    if store is not None:
        used = store.num_allocated_blocks - len(store.allocated_blocks_free_list)
        return Used(used, store.num_blocks)
    used = chunks_of(manager, "_num_allocated_{}") - len(manager._free_list)
    return Used(used, chunks_of(manager, "_num_{}"))


def _simple(connector: Any) -> Used:
    # A stored block that no copy references is free in this pool, like vLLM's cached blocks.
    pool = connector.scheduler_manager.cpu_block_pool
    return Used(len(pool.cached_block_hash_to_block), pool.num_gpu_blocks)


# How full the CPU tier of a connector is; other connectors are not shown.
_USED: dict[str, Callable[[Any], Used]] = {
    connectors.OFFLOADING: _offloading,
    connectors.SIMPLE: _simple,
}


def _known(core: Any) -> Iterator[tuple[str, Any, connectors.Leaf]]:
    """Yield the connectors of an engine that have a CPU tier, with how they are configured."""
    parts = list(connectors.parts(core.scheduler.connector))
    # In the order of their configuration, which MultiConnector keeps.
    leaves = connectors.leaves(core.vllm_config.kv_transfer_config)
    for part, leaf in zip(parts, leaves, strict=False):
        name = type(part).__name__
        if name in _USED:
            yield name, part, leaf


def first(core: Any) -> dict[str, int] | None:
    """Return the used and total blocks of the first CPU tier; None without one."""
    for name, part, _ in _known(core):
        found = _USED[name](part)
        return {"used_blocks": found.used, "total_blocks": found.total}
    return None


def cpu(core: Any) -> list[dict[str, Any]]:
    """Return the bytes of every CPU tier: the size that is configured, and what is used of it."""
    found = []
    ranks = int(core.vllm_config.parallel_config.world_size)
    for name, part, leaf in _known(core):
        blocks, size = _USED[name](part), cpu_tier.asked(leaf, ranks)
        if blocks.total > 0 and size > 0:
            found.append(
                {
                    "connector": name,
                    "tier": CPU,
                    "used_bytes": size * blocks.used // blocks.total,
                    "total_bytes": size,
                }
            )
    return found


def disks(core: Any) -> list[dict[str, Any]]:
    """Return what every secondary tier did with its disk."""
    found = []
    for name, part, _ in _known(core):
        scheduler = getattr(part, "connector_scheduler", None)
        for tier in getattr(getattr(scheduler, "manager", None), "secondary_tiers", ()):
            disk = getattr(tier, "disk", None)
            if isinstance(disk, Disk):
                found.append(
                    {
                        "connector": name,
                        "tier": str(tier.tier_type),
                        "errors": {kind: disk.errors[kind] for kind in ERRORS},
                        "bytes": {outcome: disk.moved_bytes[outcome] for outcome in OUTCOMES},
                        **_size(getattr(tier, "folder", None)),
                    }
                )
    return found


def _size(folder: Any) -> dict[str, int]:
    """Return the size of a tier's folder, and what engines hold of it; nothing without a size."""
    if folder is None or not folder.limit:
        return {}
    return {"held_bytes": folder.held, "size_bytes": folder.limit}
