"""What requests need of an engine's memory, in bytes of the device, all layers together.

Counted in blocks of the scheduler's groups, each of which takes blocks of one size from kvcached's
pages. Blocks that requests share are counted for each: it is known only of requests that run.
"""

from __future__ import annotations

import bisect
from typing import Any

from kvpatch.upstream import kvcached_api


def longest(engine: Any) -> int:
    """Return what one request of the longest length needs, in whole pages."""
    blocks = longest_in_blocks(engine.scheduler.kv_cache_config, engine.vllm_config)
    return _in_pages(kvcached_api.manager_of(engine), blocks)


def longest_in_blocks(cache: Any, config: Any) -> int:
    """Return the blocks that one request of the longest length needs, and block 0: nobody's."""
    return sum(most for _, most in _groups(cache, config)) + 1


def longest_that_fits(cache: Any, config: Any, blocks: int) -> int:
    """Return the longest ``max_model_len`` whose requests fit so many blocks; 0 if none does."""
    model = config.model_config
    longest = model.max_model_len

    def need(tokens: int) -> int:
        model.max_model_len = tokens  # as vLLM's own estimate does: specs read it there
        return longest_in_blocks(cache, config)

    try:
        return bisect.bisect_right(range(1, longest + 1), blocks, key=need)
    finally:
        model.max_model_len = longest


def present(engine: Any) -> int:
    """Return what the requests need that are there, with what they have; on the engine's thread."""
    groups = _groups(engine.scheduler.kv_cache_config, engine.vllm_config)
    blocks = 0
    for request in engine.scheduler.requests.values():
        # The next token needs a place too.
        blocks += sum(min(request.num_tokens // size + 1, most) for size, most in groups)
    return _in_pages(kvcached_api.manager_of(engine), blocks) if blocks else 0


def _groups(cache: Any, config: Any) -> list[tuple[int, int]]:
    """Return the tokens of a block, and the most blocks of a request, of every group."""
    found = []
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        most = -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
        found.append((int(spec.block_size), int(most)))
    return found


def _in_pages(manager: Any, blocks: int) -> int:
    of_page = max(1, manager.page_size // manager.block_mem_size)
    return int(-(-blocks // of_page)) * kvcached_api.page_bytes(manager)
