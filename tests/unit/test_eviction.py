"""Which cached blocks are evicted, and that finding them does not cost what is cached."""

from collections import OrderedDict

import pytest
from fakes import raising

from kvpatch.patches.elastic_memory import eviction
from kvpatch.patches.suspend.coldest import LOOK, Coldest

PAGE = 4  # blocks


class Pool:
    """kvcached's pool and its manager; blocks of requests are not evictable."""

    block_mem_size = 1

    def __init__(self, unused, used=()):
        self._evictable_blocks = OrderedDict.fromkeys(unused)
        self.used = set(used)
        self.kv_cache_manager = self.page_allocator = self
        self.grouped = []
        self.evicted = []

    def group_indices_by_page(self, blocks, size):
        self.grouped.append(len(blocks))
        pages = {}
        for block in blocks:
            pages.setdefault(block // PAGE, []).append(block)
        return pages

    def get_page_occupancy(self, pages):
        there = self.used | self._evictable_blocks.keys()
        return {page: sum(block // PAGE == page for block in there) for page in pages}

    def evict_blocks(self, blocks):
        self.evicted += blocks
        for block in blocks:
            del self._evictable_blocks[block]


def evict(pool, *args, **kwargs):
    never = raising(AssertionError("kvcached lists all blocks"))
    return eviction.around_evict(never, pool, args, kwargs)


@pytest.mark.parametrize(
    ("cached", "count", "evicted"),
    [
        ([9, 1, 8, 2, 3], 3, [9, 1, 8]),  # events come in another order
        ([4, 5], 9, [4, 5]),  # no more than is cached
    ],
)
def test_an_allocation_evicts_in_the_order_of_the_last_use(cached, count, evicted):
    pool = Pool(cached)
    assert evict(pool, count, page_aware=False) == len(evicted)
    assert pool.evicted == evicted
    assert pool.grouped == []


@pytest.mark.parametrize(
    ("more", "count", "evicted"),
    [
        (True, 4, [4, 5, 6, 7]),
        (True, 5, [4, 5, 6, 7, 0]),
        (True, 8, [*range(4, 12)]),
        (True, 10, [*range(4, 12), 0, 1]),
        (True, 11, [*range(4, 12), 0, 1, 12]),
        (False, 3, [4, 5, 6]),  # a page that is too large is not begun
        (False, 9, [4, 5, 6, 7, 0]),
    ],
)
def test_the_cap_evicts_whole_pages_first_and_then_the_coldest_blocks(more, count, evicted):
    pool = Pool([0, 1, *range(4, 13)], used=(2, 13)) if more else Pool([4, 5, 6, 7, 0])
    assert evict(pool, count) == len(evicted)
    assert pool.evicted == evicted


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
