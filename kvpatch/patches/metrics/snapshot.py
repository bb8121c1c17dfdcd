"""What can be read of an engine at any time, from its own thread or another.

Only plain attributes and kvcached's page counts are read, which take kvcached's own
lock for an instant and without the interpreter's: nothing here waits for a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvpatch.patches.fence.hooks import fence_of
from kvpatch.telemetry.counters import OUTCOMES, Totals
from kvpatch.upstream import connectors, kvcached_api
from kvpatch.upstream.vllm_api import chunks_of


def engine(core: Any, totals: Totals) -> dict[str, Any]:
    """Return what an ``EngineCore`` has done and holds, as JSON."""
    return {
        "model": str(core.vllm_config.model_config.served_model_name),
        "requests": {
            "running": len(core.scheduler.running),
            "waiting": len(core.scheduler.waiting),
        },
        "steps": totals.steps,
        "since_step": max(0.0, time.monotonic() - totals.stepped),
        "device": device(core),
        "fence": fence(core),
        "tier": tier(core),
        "connector": totals.connector,
        "bytes": {outcome: totals.moved_bytes[outcome] for outcome in ("stored", "loaded")},
        "operations": {outcome: totals.operations[outcome] for outcome in OUTCOMES},
        "hits": dict(totals.hits) if totals.counts_hits else None,
        "queries": dict(totals.queries) if totals.counts_hits else None,
    }


def device(core: Any) -> dict[str, int]:
    """Return kvcached's memory in bytes and its pages, all layers of a page together.

    ``mapped`` holds blocks or waits for the fence, ``reserved`` is mapped ahead, and
    ``total`` is what may be mapped at most. Source: ``PageAllocator::get_page_state``.
    """
    manager = kvcached_api.manager_of(core)
    state = manager.page_allocator.get_page_state()
    return {
        "page_bytes": manager.page_size * manager.num_layers * manager.num_kv_buffers,
        "mapped_pages": int(state["inuse_pages"]),
        "reserved_pages": int(state["reserved_pages"]),
        "total_pages": int(state["total_pages"]),
    }


def fence(core: Any) -> dict[str, int] | None:
    """Return the fence's counters and what it holds now; None when there is no connector."""
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
    # A stored block that no copy names is free in this pool, as vLLM's cached blocks are.
    pool = connector.scheduler_manager.cpu_block_pool
    return {
        "used_blocks": len(pool.cached_block_hash_to_block),
        "total_blocks": pool.num_gpu_blocks,
    }


# How full the CPU tier of a connector is; one that is not named here is not shown.
TIERS: dict[str, Callable[[Any], dict[str, int]]] = {
    "OffloadingConnector": _offloading_tier,
    "SimpleCPUOffloadConnector": _simple_tier,
}


def tier(core: Any) -> dict[str, int] | None:
    """Return how many blocks of the CPU tier hold something, of how many."""
    for connector in connectors.parts(core.scheduler.connector):
        measure = TIERS.get(type(connector).__name__)
        if measure is not None:
            return measure(connector)
    return None
