"""The state of an engine, readable at any time, from its own thread or another.

Only plain attributes and kvcached's page counts are read; the latter take kvcached's own
lock briefly and without the GIL. Nothing here waits for a step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvpatch import state
from kvpatch.environ import KVCACHED_IPC_NAME
from kvpatch.patches.fence.hooks import fence_of
from kvpatch.status import record
from kvpatch.telemetry.counters import OUTCOMES, Totals
from kvpatch.telemetry.host_pool import HostPool
from kvpatch.upstream import connectors, kvcached_api
from kvpatch.upstream.vllm_api import chunks_of


def engine(core: Any, totals: Totals) -> dict[str, Any]:
    """Return the counts and current state of an ``EngineCore``, as JSON."""
    running, waiting = len(core.scheduler.running), len(core.scheduler.waiting)
    could_move = bool(waiting and not running and not paused(core))
    return {
        "model": str(core.vllm_config.model_config.served_model_name),
        "requests": {"running": running, "waiting": waiting},
        "steps": totals.steps,
        "since_step": max(0.0, time.monotonic() - totals.stepped),
        "waits": totals.waits(could_move),
        "pool": os.environ.get(KVCACHED_IPC_NAME.name, ""),
        "off": totals.fuse.off,
        "device": device(core),
        "zero_page_bytes": zero_page_bytes(core),
        "elastic": record.elastic,
        "fence": fence(core),
        "tier": tier(core),
        "host_pool": host_pool(core),
        "connector": totals.connector,
        "bytes": {outcome: totals.moved_bytes[outcome] for outcome in ("stored", "loaded")},
        "operations": {outcome: totals.operations[outcome] for outcome in OUTCOMES},
        "hits": dict(totals.hits) if totals.counts_hits else None,
        "queries": dict(totals.queries) if totals.counts_hits else None,
    }


def paused(core: Any) -> bool:
    """Return whether the operator paused the engine, whose requests then wait for him.

    vLLM 0.16 has a flag on the engine; later ones have a state on the scheduler.
    """
    pause = getattr(core.scheduler, "_pause_state", None)
    if pause is not None:
        return bool(pause.name != "UNPAUSED")
    return bool(getattr(core, "_scheduler_paused", False))


def device(core: Any) -> dict[str, int]:
    """Return kvcached's page size in bytes and page counts, all layers of a page together.

    Mapped pages hold blocks or are held by the fence, reserved pages are mapped ahead of use,
    and total is the most that may be mapped. Source: ``PageAllocator::get_page_state``.
    """
    manager = kvcached_api.manager_of(core)
    pages = manager.page_allocator.get_page_state()
    return {
        "page_bytes": manager.page_size * manager.num_layers * manager.num_kv_buffers,
        "mapped_pages": int(pages["inuse_pages"]),
        "reserved_pages": int(pages["reserved_pages"]),
        "total_pages": int(pages["total_pages"]),
    }


def zero_page_bytes(core: Any) -> int:
    """Return the bytes of the page that kvcached maps wherever nothing else is mapped.

    The device is charged for it, once, as long as the engine runs; kvcached counts it nowhere.
    Source: ``FTensorAllocator::create_kv_tensors`` in allocator.cpp.
    """
    manager = kvcached_api.manager_of(core)
    layers = manager.num_layers * manager.num_kv_buffers if kvcached_api.contiguous() else 1
    return int(manager.page_size * layers)


def fence(core: Any) -> dict[str, int] | None:
    """Return the fence's counters and the pages held now; None without a connector."""
    standing = fence_of(core)
    if standing is None:
        return None
    return asdict(standing.counters) | {"holding": standing.holding}


def _offloading_tier(connector: Any) -> dict[str, int]:
    manager = connector.connector_scheduler.manager
    manager = getattr(manager, "primary_tier", manager)
    manager = getattr(manager, "_backing", manager)  # with store_threshold, 0.18 to 0.21
    store = getattr(manager, "backend", None)  # up to 0.18
    if store is not None:
        used = store.num_allocated_blocks - len(store.allocated_blocks_free_list)
        return {"used_blocks": used, "total_blocks": store.num_blocks}
    used = chunks_of(manager, "_num_allocated_{}") - len(manager._free_list)
    return {"used_blocks": used, "total_blocks": chunks_of(manager, "_num_{}")}


def _simple_tier(connector: Any) -> dict[str, int]:
    # A stored block that no copy references is free in this pool, like vLLM's cached blocks.
    pool = connector.scheduler_manager.cpu_block_pool
    return {
        "used_blocks": len(pool.cached_block_hash_to_block),
        "total_blocks": pool.num_gpu_blocks,
    }


# The usage of a connector's CPU tier; other connectors are not shown.
TIERS: dict[str, Callable[[Any], dict[str, int]]] = {
    "OffloadingConnector": _offloading_tier,
    "SimpleCPUOffloadConnector": _simple_tier,
}


def host_pool(core: Any) -> dict[str, Any] | None:
    """Return the engine's part in a host pool; None without one."""
    part = state.find(core, HostPool)
    return None if part is None else part.describe()


def tier(core: Any) -> dict[str, int] | None:
    """Return the used and total blocks of the CPU tier, or None."""
    for connector in connectors.parts(core.scheduler.connector):
        measure = TIERS.get(type(connector).__name__)
        if measure is not None:
            return measure(connector)
    return None
