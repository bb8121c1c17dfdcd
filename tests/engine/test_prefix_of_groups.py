"""The prefix that groups of KV cache have found, on vLLM's own managers, without an engine."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from packaging.version import Version

from kvpatch.patch import Transaction
from kvpatch.patches.elastic_memory import FEATURE
from kvpatch.supported import release_of
from kvpatch.versions import installed

RELEASE = release_of(installed("vllm")[0])
BLOCK = 16
WINDOW = 4 * BLOCK


class Exhausted(RuntimeError):
    """As kvcached's: another engine has taken the pages that were counted as free."""


class Pool:
    """As kvcached's pool: what is free has no ids, and cached blocks are evicted in LRU order."""

    enable_prefix_cache = True

    def __init__(self, free: int) -> None:
        from vllm.v1.core.kv_cache_utils import KVCacheBlock

        self.blocks = [KVCacheBlock(block_id) for block_id in range(32)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free = self.blocks[-free:] if free else []
        self._evictable_blocks: OrderedDict[int, Any] = OrderedDict()

    def cached(self, *block_ids: int) -> list[Any]:
        blocks = [self.blocks[block_id] for block_id in block_ids]
        self._evictable_blocks.update((block.block_id, block) for block in blocks)
        return blocks

    def touch(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1
            self._evictable_blocks.pop(block.block_id, None)

    def get_new_blocks(self, count: int) -> list[Any]:
        while len(self.free) < count and self._evictable_blocks:
            self.free.append(self._evictable_blocks.popitem(last=False)[1])
        if len(self.free) < count:
            raise Exhausted
        new, self.free = self.free[:count], self.free[count:]
        for block in new:
            block.ref_cnt = 1
        return new

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._evictable_blocks[block.block_id] = block


class Groups:
    """vLLM's coordinator of one group with full attention and one with a window."""

    def __init__(self, pool: Pool) -> None:
        from vllm.v1.core import single_type_kv_cache_manager as managers
        from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

        self.coordinator = object.__new__(HybridKVCacheCoordinator)
        self.coordinator.block_pool = pool
        self.managers = []
        for kind in (managers.FullAttentionManager, managers.SlidingWindowManager):
            manager = object.__new__(kind)
            manager.block_pool = pool
            manager.block_size = BLOCK
            manager.enable_caching = True
            manager.kv_cache_spec = None
            manager.sliding_window = WINDOW
            manager.extra_retained_tokens = 0  # from 0.31 on
            manager.num_cached_block = {}
            manager.req_to_blocks = defaultdict(list)
            manager.new_block_ids = []
            manager._null_block = pool.null_block
            manager._record_new_block_ids = False
            self.managers.append(manager)
        self.coordinator.single_type_managers = tuple(self.managers)

    def allocate(self, found: tuple[list[Any], ...], local: int, external: int) -> None:
        self.coordinator.allocate_new_computed_blocks(
            "request", found, local * BLOCK, external * BLOCK
        )

    def blocks(self) -> list[list[int]]:
        return [
            [block.block_id for block in manager.req_to_blocks["request"]]
            for manager in self.managers
        ]


@pytest.fixture(autouse=True)
def row():
    transaction = Transaction()
    transaction.apply_all(
        row for row in FEATURE.at(RELEASE) if row.id == "elastic_memory.hits_of_all_groups"
    )
    yield transaction
    transaction.revert_to(0)


def test_the_row_is_in_force_where_one_group_allocates_before_the_next_has_its_hits(row):
    assert bool(row.applied) == (Version("0.19") <= RELEASE < Version("0.24"))


def test_no_group_loads_into_the_prefix_of_another():
    pool = Pool(free=1)
    of_window = pool.cached(1, 2)  # the least recently used
    of_full = pool.cached(3, 4)
    pool.cached(5, 6, 7, 8)
    groups = Groups(pool)
    groups.allocate((of_full, of_window), local=2, external=3)
    full, window = groups.blocks()
    assert full[:2] == [3, 4]
    assert window[:2] == [0, 2]  # the window begins behind block 1
    assert sorted(full[2:] + window[2:]) == [1, 5, 6, 7, 8, 31]
    in_use = {block for block in full + window if block}
    assert all(pool.blocks[block].ref_cnt == 1 for block in in_use)
    assert not in_use & pool._evictable_blocks.keys()


def test_a_failed_allocation_leaves_the_prefix_to_be_evicted():
    pool = Pool(free=0)
    of_window = pool.cached(1, 2)
    of_full = pool.cached(3, 4)
    groups = Groups(pool)
    with pytest.raises(Exhausted):
        groups.allocate((of_full, of_window), local=2, external=3)
    for manager in groups.managers:  # as kvcached rolls back
        pool.free_blocks(reversed(manager.req_to_blocks.pop("request", [])))
    assert sorted(pool._evictable_blocks) == [2, 3, 4]  # 1 was evicted: the window skips it
    assert all(block.ref_cnt == 0 for block in pool.blocks[1:5])


def test_nothing_is_touched_for_a_request_that_loads_nothing():
    pool = Pool(free=2)
    of_full, of_window = pool.cached(3, 4), pool.cached(1, 2)
    groups = Groups(pool)
    groups.allocate((of_full, of_window), local=2, external=0)
    assert groups.blocks() == [[3, 4], [1, 2]]
    assert [block.ref_cnt for block in pool.blocks[1:5]] == [1, 1, 1, 1]
