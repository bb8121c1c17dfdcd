"""SimpleCPUOffloadConnector before 0.26: what one of several copies, or one step, hides."""

from types import SimpleNamespace

from test_simple_eviction import match
from test_simple_legacy import planner

from kvpatch.patches.simple_offload import legacy


def test_a_raised_target_ends_with_its_step():
    lazy = planner(cached=8)
    assert match(lazy, tokens=200, hit=112) == (None, False)
    assert lazy.walk() == [1, 2, 3, 4, 5, 6, 7]
    assert lazy._target_free == 4
    assert not lazy.order.full
    assert lazy._cursor is None


def test_blocks_of_every_store_in_flight_are_left_out():
    stored = SimpleNamespace(get_one_block=lambda key: None)
    pool = SimpleNamespace(
        cached_block_hash_to_block=stored,
        blocks=[SimpleNamespace(block_hash=name) for name in "abcd"],
    )
    transfers = {n: SimpleNamespace(cpu_block_ids=ids) for n, ids in enumerate(([0, 1], [3]))}
    eager = SimpleNamespace(cpu_block_pool=pool, _store_event_to_blocks=transfers)

    def prepare():
        known = pool.cached_block_hash_to_block
        return [key for key in "abcd" if known.get_one_block(key) is None]

    assert legacy.around_eager_stores(prepare, eager, (), {}) == ["c"]
