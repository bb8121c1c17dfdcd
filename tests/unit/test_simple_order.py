"""Lazy mode again, for what loses blocks: resets, several groups, full tiers, used blocks."""

from types import SimpleNamespace

import pytest
from test_simple_eviction import Pool, match, planner

from kvpatch.patches.simple_offload import eviction


def test_what_comes_back_after_a_reset_of_the_prefix_cache_is_stored():
    """kvcached's reset clears the evictable blocks in one call, and pops none of them."""
    lazy = planner(cached=4)
    assert lazy.walk() == [1, 2, 3, 4]
    lazy.copies_end()
    lazy.pool._evictable_blocks.clear()
    lazy.cpu_block_pool.has.clear()
    assert list(lazy.pool._evictable_blocks) == []
    lazy.pool.free(2)
    assert lazy.walk() == [2]


def test_a_block_used_during_one_store_keeps_its_place_after_the_next():
    lazy = planner(cached=3)
    lazy.walk()
    lazy.pool.touch(2)
    lazy.copies_end()
    assert list(lazy.pool._evictable_blocks) == [1, 3, 2]
    lazy.pool.touch(2)  # evictable now: an ordinary use
    lazy.pool.free(2)
    lazy.cpu_block_pool.has.remove("h2")
    assert lazy.walk() == [2]
    lazy.copies_end()
    assert list(lazy.pool._evictable_blocks) == [2, 1, 3]


def test_a_pop_says_what_a_dictionary_says():
    blocks = eviction.EvictableBlocks({1: "one"})
    blocks.offered.add(1)
    assert blocks.pop(1) == "one"
    assert (blocks.offered, blocks.used) == (set(), set())
    assert blocks.pop(1, None) is None
    assert blocks.used == {1}
    with pytest.raises(KeyError):
        blocks.pop(1)
    blocks[1] = "again"
    assert blocks.used == set()


def test_free_memory_has_nothing_to_store():
    nothing = next(iter(planner(cached=1, free=1).order.iter_blocks_after(None)))
    assert (nothing.ref_cnt, nothing.block_hash, nothing.is_null) == (0, None, False)


def test_without_a_cap_nothing_is_above_it():
    assert planner(cached=8, cap=-1).order.above_cap == 0
    assert planner(cached=8, cap=0).order.above_cap == 8
    assert planner(cached=8, cap=9).order.above_cap == 0


def test_a_trim_evicts_only_what_has_a_copy_or_nothing_to_copy():
    lazy = planner(cached=5, free=50, cap=1)
    lazy.pool.victims = [4, 5]
    lazy.cpu_block_pool.has = ["h5", "h1"]
    lazy.pool.blocks[2].block_hash = None
    lazy.order.trim()  # above by four: 4, 5, then 1, 2 in their order, each once
    assert list(lazy.pool._evictable_blocks) == [3, 4]
    assert lazy.walk() == [4]


def test_a_victim_that_is_stored_already_is_not_stored_twice():
    lazy = planner(cached=4, free=50, cap=2)
    lazy.pool.victims = [3, 4]
    assert lazy.walk() == [3, 4]
    lazy.pool.blocks[1].block_hash = "h3"  # the same content, its copy is on the way
    lazy.pool.max_cached_blocks = 0
    assert lazy.walk() == [2]


def test_one_block_without_a_copy_is_enough_to_wait_for():
    lazy = planner(cached=8)
    lazy.cpu_block_pool.has = ["h1", "h3"]
    assert match(lazy, tokens=16) == (0, False)
    assert match(lazy, tokens=33) == (None, False)
    lazy.order.end_step()
    lazy.cpu_block_pool.has = ["h1", "h2", "h3"]
    assert match(lazy, tokens=48) == (0, False)
    lazy.pool.blocks[2].block_hash = None  # nothing to lose
    lazy.cpu_block_pool.has = ["h1", "h3"]
    assert match(lazy, tokens=48) == (0, False)


def test_what_was_offered_and_given_up_is_not_waited_for():
    """The tier evicted the copy; the block is not offered again, so that waiting would not end."""
    lazy = planner(cached=4)
    lazy.walk()
    lazy.copies_end()
    lazy.cpu_block_pool.has.clear()
    assert match(lazy, tokens=64) == (0, False)


def test_a_full_tier_is_waited_for_while_a_copy_is_in_flight():
    lazy = planner(cached=8)
    assert lazy.walk() == [1, 2, 3, 4]
    lazy.cpu_block_pool.room = 0
    assert match(lazy, tokens=64) == (None, False)
    lazy.order.end_step()
    lazy.copies_end()
    lazy.pool.evict_blocks({1, 2, 3, 4})
    assert match(lazy, tokens=64) == (0, False)


@pytest.mark.parametrize(
    ("given", "tokens", "waits"),
    [
        ({"free": 1}, 16, False),
        ({"free": 1}, 17, True),  # a part of a block takes a whole one
        ({"free": 4}, 500, False),  # a prompt computes at most a batch at a time
        ({"free": 3}, 500, True),
        ({"free": 1, "ranks": 2}, 32, False),  # ranks of a context share its blocks
        ({"free": 1}, 32, True),
        ({"free": 1, "ranks": None}, 17, True),
        ({"free": 3, "sizes": (16, 32)}, 32, False),  # two in one group and one in the other
        ({"free": 3, "sizes": (16, 32)}, 33, True),  # three and two
        ({"room": 0}, 16, False),  # a tier without room has no copy to wait for
        ({"room": 0}, 48, False),
    ],
)
def test_a_prompt_waits_if_it_evicts_a_block(given, tokens, waits):
    assert match(planner(cached=8, **given), tokens) == ((None, False) if waits else (0, False))


@pytest.mark.parametrize(("tokens", "raised"), [(16, 4), (33, 5)])
def test_a_target_is_raised_for_a_prompt_and_its_step_and_never_lowered(tokens, raised):
    lazy = planner(cached=8, sizes=(16, 32))
    assert match(lazy, tokens) == (None, False)
    assert lazy._target_free == raised
    lazy.order.end_step()
    assert lazy._target_free == 4


def test_what_is_computed_already_needs_no_blocks():
    lazy = planner(cached=8, free=1)
    request = SimpleNamespace(num_tokens=48)
    found = eviction.around_match(lambda *both: (0, False), lazy, (request, 32), {})
    assert found == (0, False)
    found = eviction.around_match(
        lambda **both: (0, False), lazy, (), {"request": request, "num_computed_tokens": 31}
    )
    assert found == (None, False)


def test_a_prompt_that_vllm_defers_itself_stays_deferred():
    lazy = planner(cached=8, free=9)
    request = SimpleNamespace(num_tokens=16)
    assert eviction.around_match(lambda *both: (None, False), lazy, (request, 0), {}) == (
        None,
        False,
    )


@pytest.mark.parametrize("hit", [(0, False), (32, True), (None, False)])
def test_eager_mode_is_vllms_own(hit):
    eager, bound = SimpleNamespace(_lazy_mode=False), []
    eviction.around_bind(bound.append, eager, ("pool",), {})
    assert bound == ["pool"]
    assert eviction.order_of(eager) is None
    assert eviction.around_match(lambda *both: hit, eager, (object(), 0), {}) == hit
    assert eviction.around_lazy_stores(lambda *args: args, eager, (1,), {}) == (1,)
    stored = []
    eviction.around_stored(stored.append, eager, ([1, 2],), {})
    assert stored == [[1, 2]]
    assert eviction.around_free(lambda *args: args, Pool(cached=1), (1,), {}) == (1,)


def test_a_walk_that_fails_ends_its_step():
    lazy = planner(cached=8)
    assert match(lazy, tokens=200, hit=112) == (None, False)
    with pytest.raises(ZeroDivisionError):
        eviction.around_lazy_stores(lambda: 1 / 0, lazy, (), {})
    assert not lazy.order.full
    assert lazy._target_free == 4


def test_a_block_with_a_copy_was_offered_too():
    """Once: when the tier gives the copy up, the block waits until it is used again."""
    lazy = planner(cached=4)
    lazy.cpu_block_pool.has = ["h1"]
    assert lazy.walk() == [2, 3, 4]
    lazy.cpu_block_pool.has.clear()
    assert lazy.walk() == []


def test_blocks_of_every_store_in_flight_count():
    lazy = planner(cached=12)
    for stored in ([1, 2, 3, 4], [5, 6, 7, 8], []):
        lazy._target_free = 8 if stored[:1] != [1] else 4
        assert lazy.walk() == stored
