"""Which cached blocks kvcached's pool evicts, without a walk over all of them.

kvcached lists all cached blocks for every eviction, and orders them by their pages for its cap on
cached tokens, once for each request that ends: with a cache of 1,000,000 tokens tens of
milliseconds of every step. The coldest blocks are at the head of its order.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from kvpatch.upstream import kvcached_api

LOOK = 256  # blocks beside twice those to be evicted, among which whole pages are looked for


def victims(pool: Any, count: int, whole_pages: bool) -> list[int]:
    """Return the blocks to evict, at most so many.

    Args:
        pool: kvcached's ``ElasticBlockPool``.
        count: how many.
        whole_pages: first those of the coldest whole pages, up to one that is too large, because
            only a page without any block gives memory back; else in the order of their last use.
    """
    chosen: dict[int, None] = {}
    if whole_pages:
        for page in kvcached_api.unused_pages(pool, 2 * count + LOOK):
            if len(chosen) + len(page.blocks) > count:
                break
            chosen.update(dict.fromkeys(page.blocks))
    # What is chosen may be all that the head has.
    coldest = islice(pool._evictable_blocks, count + len(chosen))
    chosen.update(
        dict.fromkeys(islice((b for b in coldest if b not in chosen), count - len(chosen)))
    )
    return list(chosen)


def around_evict(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> int:
    """Evict the coldest blocks and return how many; whole pages of warmer ones stay."""

    def bind(num_to_evict: int, page_aware: bool = True) -> tuple[int, bool]:
        return num_to_evict, page_aware

    found = victims(instance, *bind(*args, **kwargs))
    instance.evict_blocks(found)  # in their order, as the events of vLLM are
    return len(found)
