"""Rows that let KV cache events out of kvcached's block pool."""

from __future__ import annotations

from kvpatch.patch import Feature, Patch
from kvpatch.registry.releases import KVCACHED_RANGE, VLLM_RANGE

_POOL = "vllm.v1.core.block_pool:ElasticBlockPool"
_UPSTREAM = "ovg-project/kvcached, ElasticBlockPool in 0.1.6 (asserts that events are off)"
_UNTIL = "kvcached's block pool makes events"

FEATURE = Feature(
    name="kv-events",
    summary="routers that follow kv_events_config see elastic memory as they see vLLM's own",
    vllm=VLLM_RANGE,
    kvcached=KVCACHED_RANGE,
    patches=(
        Patch(
            id="events.switch",
            target="vllm.v1.core.kv_cache_coordinator:"
            "KVCacheCoordinator._setup_kvcached_coordinator",
            why="kvcached's pool is made with events off, whatever kv_events_config says",
            upstream=_UPSTREAM,
            until=_UNTIL,
            wrapper="kvpatch.events:carry_the_switch",
            parameters=("self",),
            vllm=">=0.26,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="events.take",
            target=f"{_POOL}.take_events",
            why="kvcached's pool answers that there are no events",
            upstream=_UPSTREAM,
            until=_UNTIL,
            wrapper="kvpatch.events:take",
            parameters=("self",),
            vllm=">=0.26,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="events.remove",
            target=f"{_POOL}._remove_cached_block",
            why="kvcached evicts blocks without a word, and routers send prompts after them",
            upstream=_UPSTREAM,
            until=_UNTIL,
            wrapper="kvpatch.events:remove",
            parameters=("self", "key", "block_id"),
            vllm=">=0.26,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="events.reset",
            target=f"{_POOL}.reset_prefix_cache",
            why="a reset of the prefix cache is not told",
            upstream=_UPSTREAM,
            until=_UNTIL,
            wrapper="kvpatch.events:reset",
            parameters=("self",),
            vllm=">=0.26,<0.34",
            kvcached="==0.1.6",
        ),
    ),
)
