"""Which cached blocks are evicted, and that finding them does not cost what is cached."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from kvpatch.patches.elastic_memory import eviction
from kvpatch.patches.suspend.coldest import LOOK, Coldest

PAGE = 4  # blocks


class Pool:
    """kvcached's pool and its manager; blocks of requests are not evictable."""

    block_mem_size = 1

    def __init__(self, unused: list[int], used: tuple[int, ...] = ()) -> None:
        self._evictable_blocks = OrderedDict.fromkeys(unused)
        self.used = set(used)
        self.kv_cache_manager = self.page_allocator = self
        self.grouped: list[int] = []
        self.evicted: list[int] = []

    def group_indices_by_page(self, blocks: list[int], size: int) -> dict[int, list[int]]:
        self.grouped.append(len(blocks))
        pages: dict[int, list[int]] = {}
        for block in blocks:
            pages.setdefault(block // PAGE, []).append(block)
        return pages

    def get_page_occupancy(self, pages: list[int]) -> dict[int, int]:
        there = self.used | self._evictable_blocks.keys()
        return {page: sum(block // PAGE == page for block in there) for page in pages}

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted += blocks
        for block in blocks:
            del self._evictable_blocks[block]


def evict(pool: Pool, *args: Any, **kwargs: Any) -> int:
    def never(*_: Any) -> int:
        raise AssertionError("kvcached lists all blocks")

    return eviction.around_evict(never, pool, args, kwargs)


def test_an_allocation_evicts_in_the_order_of_the_last_use():
    pool = Pool([9, 1, 8, 2, 3])
    assert evict(pool, 3, page_aware=False) == 3
    assert pool.evicted == [9, 1, 8], "events come in another order"
    assert pool.grouped == []


@pytest.mark.parametrize(
    ("count", "evicted"),
    [
        (4, [4, 5, 6, 7]),
        (5, [4, 5, 6, 7, 0]),
        (8, [*range(4, 12)]),
        (10, [*range(4, 12), 0, 1]),
        (11, [*range(4, 12), 0, 1, 12]),
    ],
)
def test_the_cap_evicts_whole_pages_first_and_then_the_coldest_blocks(count, evicted):
    pool = Pool([0, 1, *range(4, 13)], used=(2, 13))
    assert evict(pool, count) == count
    assert pool.evicted == evicted


def test_a_page_that_is_too_large_is_not_begun():
    pool = Pool([4, 5, 6, 7, 0])
    assert evict(pool, 3) == 3
    assert pool.evicted == [4, 5, 6]


@pytest.mark.parametrize("whole", [True, False])
def test_no_more_is_evicted_than_is_cached(whole):
    pool = Pool([4, 5])
    assert evict(pool, 9, whole) == 2
    assert evict(pool, 1, whole) == 0


def test_it_looks_at_the_coldest_blocks_only():
    pool = Pool(list(range(100_000)))
    assert evict(pool, 32) == 32
    assert pool.grouped == [2 * 32 + 256]
    assert pool.evicted == list(range(32))


def test_the_coldest_pages_are_found_one_after_the_other():
    pool = Pool([4, 5, 6, 7, 12, 13, 8, 9, 10, 11], used=(14,))
    coldest = Coldest(pool)
    assert coldest.next(()).number == 1
    pool.used.add(8)
    del pool._evictable_blocks[8]
    assert coldest.next({4, 5, 6, 7}) is None, "what was found before is used again"


def test_more_and_more_blocks_are_looked_at_until_a_page_is_found():
    begun = range(0, 4 * LOOK, PAGE)  # pages of which requests use the rest
    pool = Pool([*begun, *range(4 * LOOK, 12 * LOOK)], used=tuple(block + 1 for block in begun))
    coldest = Coldest(pool)
    page = coldest.next(())
    assert (page.number, pool.grouped) == (LOOK, [LOOK, 2 * LOOK])
    pool.grouped.clear()
    assert coldest.next(page.blocks).number == LOOK + 1
    assert pool.grouped == [], "found before"
    coldest.forget()
    assert coldest.next(()) == page
    assert pool.grouped == [LOOK, 2 * LOOK]
    assert LOOK == 2048


def test_nothing_is_found_where_requests_use_every_page():
    pool = Pool([*range(0, PAGE * LOOK, PAGE)], used=tuple(range(1, PAGE * LOOK, PAGE)))
    assert Coldest(pool).next(()) is None
    assert pool.grouped == [LOOK]
