"""KV cache events (``kv_events_config``) from kvcached's block pool.

vLLM tells routers which blocks an engine has: stored, removed, all cleared. The events
are made by methods of vLLM's block pool, most of which kvcached's pool inherits; what it
does in its own way, it does without them.
"""

from __future__ import annotations

from typing import Any


def carry_the_switch(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Switch the events of kvcached's pool on where vLLM's pool had them on.

    Wraps ``KVCacheCoordinator._setup_kvcached_coordinator``, which makes kvcached's pool
    in the place of vLLM's and leaves them off.
    """
    wanted = instance.block_pool.enable_kv_cache_events
    result = wrapped(*args, **kwargs)
    instance.block_pool.enable_kv_cache_events = wanted
    return result


def take(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Hand the events out as vLLM's pool does.

    Wraps ``ElasticBlockPool.take_events``, which always answers that there are none.
    """
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool.take_events(instance)


def remove(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Tell that a block is no longer cached.

    Takes the place of ``ElasticBlockPool._remove_cached_block(key, block_id)``, through
    which kvcached evicts, and does what it does.
    """

    def bind(key: Any, block_id: int) -> int:
        return block_id

    block = instance.blocks[bind(*args, **kwargs)]
    removed = instance._remove_cached_block_hashes(block)
    instance._emit_block_removed_events(removed)
    return block if removed else None


def reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Tell of a reset as one event, as vLLM does, and not of every block.

    Wraps ``ElasticBlockPool.reset_prefix_cache``, in which kvcached evicts every block.
    """
    from vllm.distributed.kv_events import AllBlocksCleared

    before = len(instance.kv_event_queue)
    done = bool(wrapped(*args, **kwargs))
    if done and instance.enable_kv_cache_events:
        del instance.kv_event_queue[before:]
        instance.kv_event_queue.append(AllBlocksCleared())
    return done
