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

    The engine has started once its pool has reserved the null block, which kvcached does in a
    thread, so that the first metrics count it.

    Wraps ``EngineCore.__init__``. If the worker is in the same process, its start-up runs
    inside this call.
    """
    record.roles, record.elastic = ["engine-core"], None
    wrapped(*args, **kwargs)
    from vllm.v1.core import block_pool

    pool = kvcached_api.pool_of(instance)
    if not isinstance(pool, block_pool.ElasticBlockPool):
        raise not_elastic()
    # Until then the count of free blocks has one too many. A device without a free page keeps the
    # thread longer, and the engine starts all the same.
    kvcached_api.wait_for_null_block(pool, _NULL_BLOCK)
    record.elastic = True
    record.layout = kvcached_api.describe_layout(instance.vllm_config)
    record.say()


def around_kv_cache_tensors(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a worker whose KV caches are not kvcached's; log its status line.

    Wraps ``GPUModelRunner.initialize_kv_cache_tensors`` and, for Runner V2 of vLLM 0.28,
    ``init_kv_cache``. kvcached marks each tensor that it allocates with a block view.
    """
    kv_caches = wrapped(*args, **kwargs)
    _verify_worker(
        {name: kvcached_api.block_view(cache) is not None for name, cache in kv_caches.items()}
    )
    return kv_caches


def remember_allocation(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Record the storages of the KV caches that kvcached allocates.

    Wraps kvcached's ``allocate_kv_cache``; from vLLM 0.29 on the caches are vLLM's own
    views of kvcached's memory.
    """
    kv_caches = wrapped(*args, **kwargs)
    kvcached_api.remember_storages(kv_caches.values())
    return kv_caches


def around_initialize_kv_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a worker whose KV caches are not kvcached's; log its status line.

    Wraps ``GPUModelRunner.initialize_kv_cache(kv_cache_config, is_profiling)`` of both
    runners. The KV cache of a profiling run is vLLM's own, and discarded.
    """
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
    """Log the status line of a worker, given which of its KV caches are kvcached's.

    Raises:
        Refusal: one of them is not.
    """
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
