"""Counting the transfers of SimpleCPUOffloadConnector, which has no stats of its own.

Its scheduler passes the copies of each step to the workers as one store and one load for
all ranks; they are counted there.
"""

from __future__ import annotations

from typing import Any

from kvpatch import state
from kvpatch.telemetry.counters import Totals
from kvpatch.upstream import connectors


def block_bytes(scheduler: Any) -> int:
    """Return the bytes of one block over all ranks, computed as the connector sizes its tier."""
    config = scheduler.kv_cache_config
    tensors = config.kv_cache_tensors
    packed = any(getattr(tensor, "block_stride", 0) for tensor in tensors)
    size = tensors[0].size if packed else sum(tensor.size for tensor in tensors)
    return int(size // config.num_blocks * scheduler.vllm_config.parallel_config.world_size)


def around_plan(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Count the store and the load of one step."""
    meta = wrapped(*args, **kwargs)
    totals = state.find(instance, Totals)
    if totals is None or totals.fuse.off:
        return meta
    with totals.fuse:
        for outcome, blocks in (
            ("stored", meta.store_gpu_blocks),
            ("loaded", meta.load_gpu_blocks),
        ):
            if blocks:
                size = len(blocks) * block_bytes(instance)
                totals.moved(outcome, 1, size, connectors.SIMPLE)
    return meta
