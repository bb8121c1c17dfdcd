"""The order in which lazy mode sees kvcached's blocks, on a pool of plain Python."""

from types import SimpleNamespace

import pytest

from kvpatch.patches.simple_offload import eviction
from kvpatch.refusal import Refusal


class Tier:
    """vLLM's pool of CPU blocks, as far as it is read: which hashes it has."""

    def __init__(self, room):
        self.blocks = []
        self.has = []  # the newest last
        self.room = room
        self.cached_block_hash_to_block = self

    def get_one_block(self, block_hash):
        return block_hash if block_hash in self.has else None

    def get_num_free_blocks(self):
        return self.room


class Pool:
    """kvcached's pool: blocks 1.. are cached and evictable, the least recently used first."""

    def __init__(self, cached, free=0, cap=-1):
        self.blocks = [
            SimpleNamespace(block_id=i, block_hash=f"h{i}", ref_cnt=0, is_null=False)
            for i in range(cached + 1)
        ]
        self._evictable_blocks = {i: self.blocks[i] for i in range(1, cached + 1)}
        self.kv_cache_manager = SimpleNamespace(
            available_size=lambda: free,
            block_mem_size=1,
            page_allocator=SimpleNamespace(group_indices_by_page=self.by_page),
            # Requests use the other pages too.
            get_page_occupancy=lambda pages: {page: 0 if page == 0 else 2 for page in pages},
        )
        self.max_cached_blocks = cap
        self.victims = []

    def by_page(self, block_ids, size):
        """The victims are all that is in a page, the others are in one each."""
        page = [block_id for block_id in block_ids if block_id in self.victims]
        others = {block_id: [block_id] for block_id in block_ids if block_id not in self.victims}
        return ({0: page} if page else {}) | others

    def evict_blocks(self, block_ids):
        for block_id in block_ids:
            self._evictable_blocks.pop(block_id)

    def touch(self, block_id):
        self._evictable_blocks.pop(block_id, None)

    def free(self, block_id):
        self._evictable_blocks[block_id] = self.blocks[block_id]


class Planner:
    """vLLM's lazy mode: the walk of 0.28, with a target of four blocks.

    Args:
        pool: kvcached's.
        room: blocks of the tier.
        sizes: tokens of a block of each group.
        ranks: of a parallel context; None up to 0.22, which knows none.
    """

    _lazy_mode = True
    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64))

    def __init__(self, pool, room=100, sizes=(16,), ranks=1):
        self.cpu_block_pool = Tier(room)
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=of)) for of in sizes]
        self.cpu_kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        if ranks is not None:
            self.cp_world_size = ranks
        self._target_free = 4
        self._store_event_to_blocks = {}
        self.pool = self._gpu_block_pool = pool
        self.bind()
        self.order = eviction.order_of(self)

    def bind(self):
        eviction.around_bind(lambda pool: None, self, (self.pool,), {})

    def walk(self):
        taken = list(eviction.around_lazy_stores(self._walk, self, (), {}))
        if taken:
            rows = []
            for block_id in taken:
                rows.append(len(self.cpu_block_pool.blocks))
                block_hash = self.pool.blocks[block_id].block_hash
                self.cpu_block_pool.blocks.append(SimpleNamespace(block_hash=block_hash))
                self.pool.touch(block_id)
            event = len(self._store_event_to_blocks) + 100 * taken[0]
            self._store_event_to_blocks[event] = SimpleNamespace(
                gpu_block_ids=taken, cpu_block_ids=rows
            )
        return taken

    def _walk(self):
        taken = []
        for covered, block in enumerate(self.pool.free_block_queue.iter_blocks_after(None)):
            if covered >= self._target_free or len(taken) >= self.cpu_block_pool.room:
                break
            if block.block_hash and not self.cpu_block_pool.get_one_block(block.block_hash):
                taken.append(block.block_id)
        return taken

    def copies_end(self):
        for event in list(self._store_event_to_blocks):
            transfer = self._store_event_to_blocks.pop(event)

            def stored(gpu_block_ids):
                for block_id in gpu_block_ids:
                    self.cpu_block_pool.has.append(self.pool.blocks[block_id].block_hash)
                    self.pool.free(block_id)

            eviction.around_stored(stored, self, (transfer.gpu_block_ids,), {})


def planner(cached, free=0, cap=-1, kind=Planner, **more):
    return kind(Pool(cached, free, cap), **more)


def test_stored_blocks_go_back_to_the_head_in_their_order():
    lazy = planner(cached=8)
    lazy.walk()
    lazy.copies_end()
    assert list(lazy.pool._evictable_blocks) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert lazy.walk() == []


def test_two_blocks_of_one_content_are_stored_once():
    lazy = planner(cached=4)
    lazy.pool.blocks[3].block_hash = "h1"
    assert lazy.walk() == [1, 2, 4]


def test_kvcached_does_not_evict_in_the_call_that_frees():
    pool = planner(cached=4, cap=2).pool
    freed = eviction.around_free(lambda *args: (pool.max_cached_blocks, *args), pool, (1,), {})
    assert freed == (-1, 1)
    assert pool.max_cached_blocks == 2
    with pytest.raises(ZeroDivisionError):
        eviction.around_free(lambda: 1 / 0, pool, (), {})
    assert pool.max_cached_blocks == 2


def match(lazy, tokens, hit=0):
    request = SimpleNamespace(num_tokens=tokens)
    return eviction.around_match(lambda request, computed: (hit, hit > 0), lazy, (request, 0), {})


def test_a_new_prompt_waits_for_the_copies_of_what_it_evicts():
    lazy = planner(cached=8, free=1)
    assert match(lazy, tokens=48) == (None, False)
    assert lazy.walk() == [1, 2, 3]
    assert match(lazy, tokens=48) == (None, False)
    lazy.walk()
    lazy.copies_end()
    assert match(lazy, tokens=48) == (0, False)


def test_prompts_behind_one_that_waits_wait_too():
    lazy = planner(cached=8)
    assert match(lazy, tokens=16) == (None, False)
    lazy.pool.kv_cache_manager.available_size = lambda: 10
    assert match(lazy, tokens=16) == (None, False)
    lazy.walk()
    assert match(lazy, tokens=16) == (0, False)


def test_a_pool_that_is_vllms_own_is_refused():
    scheduler = SimpleNamespace(_lazy_mode=True, _gpu_block_pool=SimpleNamespace())
    with pytest.raises(Refusal, match="KVP401"):
        eviction.around_bind(lambda pool: None, scheduler, (scheduler._gpu_block_pool,), {})
