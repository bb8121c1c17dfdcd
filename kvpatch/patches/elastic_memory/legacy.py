"""Elastic memory before vLLM 0.29."""

from __future__ import annotations

from typing import Any

from kvpatch.patch import argument
from kvpatch.patches.elastic_memory import capacity
from kvpatch.status import record
from kvpatch.supported import release_of
from kvpatch.upstream import kvcached_api
from kvpatch.versions import Span

# Where the frontend hears of a length that the engine lowers; else it admits longer requests.
_LENGTH_IS_TOLD = Span("0.20")


def around_kv_caches(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """As ``capacity.around_kv_caches``; before 0.18 numbers of blocks come before the config."""
    result = wrapped(*args, **kwargs)
    cache = result[-1] if isinstance(result, tuple) else result
    blocks = kvcached_api.older_blocks_of(cache)
    if blocks is not None:
        assert record.facts is not None
        told = release_of(record.facts.vllm) in _LENGTH_IS_TOLD
        capacity.require_one_request(instance, cache, blocks, lower=told)
    return result


def around_computed_blocks(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Take the prefix that all groups have found before one of them evicts for what it loads.

    A group touches its own hits and then gets new blocks for the tokens that a connector loads, for
    which kvcached evicts, in LRU order, what the groups behind it are about to use. Where its
    KVCachePoolExhausted passes, the hits are evictable again.
    """
    found = argument(args, kwargs, 1, "new_computed_blocks")
    external = argument(args, kwargs, 3, "num_external_computed_tokens")
    if not external or not any(found):
        wrapped(*args, **kwargs)
        return
    tokens = argument(args, kwargs, 2, "num_local_computed_tokens") + external
    # What a window skips is not touched by its group, and was counted as free.
    hits = [
        block
        for group, blocks in zip(instance.single_type_managers, found, strict=True)
        for block in blocks[group.get_num_skipped_tokens(tokens) // group.block_size :]
        if not block.is_null
    ]
    pool = instance.block_pool
    pool.touch(hits)
    try:
        wrapped(*args, **kwargs)
    except BaseException:
        pool.free_blocks(reversed(hits))
        raise
    for block in hits:  # the groups have touched them too
        block.ref_cnt -= 1
