"""Refusing engines and workers whose KV cache is not kvcached's; their status lines."""

from __future__ import annotations

from typing import Any

from kvpatch.refusal import Refusal
from kvpatch.status import record
from kvpatch.upstream import kvcached_api

_NULL_BLOCK = 1.0  # seconds in which kvcached's thread has reserved it


def not_elastic() -> Refusal:
    """Return the refusal of a block pool that is not kvcached's."""
    return Refusal(
        "the scheduler's block pool is vLLM's own, not kvcached's",
        "blocks would be allocated from memory that kvcached never mapped",
        "report this with the log above, or set KVPATCH=0",
        code="KVP401",
    )


def around_engine_core(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse an engine whose block pool is not elastic; log its status line.

    It has started once a thread of kvcached has reserved the null block, so that the first metrics
    count it. A worker in the same process starts inside this call.
    """
    record.roles, record.elastic = ["engine-core"], None
    wrapped(*args, **kwargs)
    from vllm.v1.core import block_pool

    pool = kvcached_api.pool_of(instance)
    if not isinstance(pool, block_pool.ElasticBlockPool):
        raise not_elastic()
    # Until then the count of free blocks has one too many. A device without a free page keeps the
    # thread longer, and the engine starts all the same.
    if not kvcached_api.has_null_block(pool, _NULL_BLOCK):
        raise Refusal(
            "kvcached did not reserve block 0, and has logged why above",
            "a request would get that block, which vLLM neither stores nor frees",
            "start the engine again, or set KVPATCH=0",
            code="KVP429",
        )
    record.elastic = True
    record.layout = kvcached_api.describe_layout(instance.vllm_config)
    record.say()


def around_kv_cache_tensors(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a worker with a KV cache that has not kvcached's mark; log its status line."""
    kv_caches = wrapped(*args, **kwargs)
    _verify_worker(
        {name: kvcached_api.block_view(cache) is not None for name, cache in kv_caches.items()}
    )
    return kv_caches


def remember_allocation(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Record the storages that kvcached allocates, of which vLLM has views from 0.29 on."""
    kv_caches = wrapped(*args, **kwargs)
    kvcached_api.remember_storages(kv_caches.values())
    return kv_caches


def around_initialize_kv_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """As ``around_kv_cache_tensors``; the KV cache of a profiling run is vLLM's, and discarded."""
    result = wrapped(*args, **kwargs)
    if not kwargs.get("is_profiling", args[1] if len(args) > 1 else False):
        _verify_worker(
            {
                f"layer {index}": kvcached_api.on_kvcached(cache)
                for index, cache in enumerate(instance.kv_caches)
            }
        )
    return result


def _verify_worker(inside: dict[str, bool]) -> None:
    """Log a worker's status line, or refuse it if one of its KV caches is not inside."""
    outside = [name for name, yes in inside.items() if not yes]
    if outside:
        raise Refusal(
            f"the KV cache of {outside[0]} was allocated outside kvcached's memory",
            "it would stay allocated while kvcached maps a second, unused pool",
            "report this with your command line, or set KVPATCH=0",
            code="KVP402",
        )
    record.elastic = bool(inside)
    if "engine-core" in record.roles:
        record.roles = ["engine-core", "worker"]
    else:
        record.roles = ["worker"]
        record.say()
