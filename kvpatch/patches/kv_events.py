"""KV cache events (``kv_events_config``) from kvcached's block pool.

vLLM publishes to routers which blocks an engine has: stored, removed, all cleared. The events
are emitted by methods of vLLM's block pool, of which kvcached's own emit none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpatch.rows import Row, feature, replacement
from kvpatch.rules import Rule
from kvpatch.upstream.targets import COORDINATOR
from kvpatch.versions import Span

_POOL = "vllm.v1.core.block_pool:ElasticBlockPool"
_UPSTREAM = "ovg-project/kvcached, ElasticBlockPool in 0.1.6 (asserts that events are off)"
_UNTIL = "kvcached's block pool emits events"


def carry_the_switch(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Enable the events of kvcached's pool if they are enabled on vLLM's, which it replaces."""
    wanted = instance.block_pool.enable_kv_cache_events
    result = wrapped(*args, **kwargs)
    instance.block_pool.enable_kv_cache_events = wanted
    return result


def take(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Return the pending events, as vLLM's pool does."""
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool.take_events(instance)


def remove(evict: Callable[[Any, Any, int], Any]) -> Callable[[Any, Any, int], Any]:
    """Return what evicts a cached block and emits the event, with the same effect otherwise.

    A plain function, because every block that is evicted goes through it.
    """

    def removing(self: Any, key: Any, block_id: int) -> Any:
        block = self.blocks[block_id]
        removed = self._remove_cached_block_hashes(block)
        self._emit_block_removed_events(removed)
        return block if removed else None

    return removing


def reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Emit one event for a reset, as vLLM does, instead of one per block."""
    from vllm.distributed.kv_events import AllBlocksCleared

    before = len(instance.kv_event_queue)
    done = bool(wrapped(*args, **kwargs))
    if done and instance.enable_kv_cache_events:
        del instance.kv_event_queue[before:]
        instance.kv_event_queue.append(AllBlocksCleared())
    return done


RULES = (
    Rule(
        "KVP325",
        "KV cache events before vLLM 0.26",
        lambda config, facts: (
            config.kv_events_config is not None
            and bool(config.kv_events_config.enable_kv_cache_events)
        ),
        "kv_events_config enables KV cache events",
        "kvcached's block pool does not emit them; what kvpatch adds is validated on vLLM 0.26 and "
        "later",
        "remove kv_events_config, or install a later vLLM",
        only_in=Span("0", "0.26"),
        with_connector=False,
    ),
)

FEATURE = feature(
    __name__,
    summary="KV cache events on elastic memory are those of vLLM's own block pool",
    since="0.26",
    upstream=_UPSTREAM,
    until=_UNTIL,
    rules=":RULES",
    optional=True,
    seams=(
        Row(
            "kv_events.switch",
            f"{COORDINATOR}._setup_kvcached_coordinator",
            ":carry_the_switch",
            "kvcached's pool is created with events disabled, whatever kv_events_config is",
        ),
        Row(
            "kv_events.take",
            f"{_POOL}.take_events",
            ":take",
            "kvcached's pool always returns no events",
        ),
        replacement(
            "kv_events.remove",
            f"{_POOL}._remove_cached_block",
            ":remove(self, key, block_id)",
            "kvcached evicts blocks without an event, and routers still send prompts to them",
        ),
        Row(
            "kv_events.reset",
            f"{_POOL}.reset_prefix_cache",
            ":reset",
            "a reset of the prefix cache emits no event",
        ),
    ),
)
