"""The state of an engine, readable at any time, from its own thread or another.

Only plain attributes and kvcached's page counts are read; the latter take kvcached's own
lock briefly and without the GIL. Nothing here waits for a step.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Any

from kvpatch import state
from kvpatch.environ import KVCACHED_IPC_NAME
from kvpatch.patches.debug import audit
from kvpatch.patches.fence.hooks import fence_of
from kvpatch.patches.metrics import tiers
from kvpatch.status import record
from kvpatch.telemetry.counters import CALLS, OUTCOMES, Moved, Totals
from kvpatch.telemetry.host_pool import HostPool
from kvpatch.telemetry.series import MOVED
from kvpatch.upstream import kvcached_api


def engine(core: Any, totals: Totals) -> dict[str, Any]:
    """Return the counts and current state of an ``EngineCore``, as JSON."""
    running, waiting = core.scheduler.get_request_counts()
    # Not one that waits for its client, as a session does for the next part of its input.
    some = core.scheduler.has_unfinished_requests()
    could_move = bool(some and not running and not paused(core))
    return {
        "model": str(core.vllm_config.model_config.served_model_name),
        "index": int(getattr(core, "engine_index", 0)),  # vLLM's number of it in its server
        "requests": {"running": running, "waiting": waiting},
        "steps": totals.steps,
        "since_step": max(0.0, time.monotonic() - totals.stepped),
        "waits": totals.waits(could_move),
        "pool": os.environ.get(KVCACHED_IPC_NAME.name, ""),
        "off": totals.fuse.off,
        "device": device(core),
        "memory": kvcached_api.device_memory(),
        "most_bytes": kvcached_api.most(kvcached_api.manager_of(core)),
        "zero_page_bytes": zero_page_bytes(core),
        "elastic": record.elastic,
        "fence": fence(core),
        "tier": tiers.first(core),
        "tiers": tiers.cpu(core),
        "disks": tiers.disks(core),
        "host_pool": host_pool(core),
        "connector": totals.connector,
        **moved(totals),
        "parts": {name: moved(part) for name, part in list(totals.parts.items())},
        "refused": {call: totals.refused[call] for call in CALLS},
        "verified": verified(),
        "hits": dict(totals.hits) if totals.counts_hits else None,
        "queries": dict(totals.queries) if totals.counts_hits else None,
        "lost_tokens": totals.lost_tokens,
        "saved_seconds": round(totals.saved_seconds, 3),
        "prefill_rate": round(totals.prefill_rate, 1),
    }


def moved(counts: Totals | Moved) -> dict[str, dict[str, int]]:
    """Return what an engine, or one of its connectors, moved."""
    return {
        "bytes": {outcome: counts.moved_bytes[outcome] for outcome in MOVED},
        "operations": {outcome: counts.operations[outcome] for outcome in OUTCOMES},
    }


def verified() -> dict[str, int] | None:
    """Return what debug mode has verified; None if it is off, or in workers' own processes."""
    if not audit.wanted():
        return None
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    return audit.checked(None) if has_kv_transfer_group() else None


def paused(core: Any) -> bool:
    """Return whether the operator paused the engine, on which vLLM 0.16 has a flag for it."""
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


def host_pool(core: Any) -> dict[str, Any] | None:
    """Return the engine's part in a host pool; None without one."""
    part = state.find(core, HostPool)
    return None if part is None else part.describe()
