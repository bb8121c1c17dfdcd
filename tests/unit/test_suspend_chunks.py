"""Chunks of several blocks: stored as a whole, and known by the requests that have them."""

import sys
from collections import OrderedDict
from types import ModuleType, SimpleNamespace

import pytest
from suspend_world import Store

from kvpatch import state
from kvpatch.patches.suspend import chunks as module
from kvpatch.patches.suspend import fixes, offloading, simple
from kvpatch.patches.suspend.chunks import Chunks
from kvpatch.patches.suspend.spill import Cached, Chunk, Spill


class Pairs(Store):
    """A tier of chunks of two blocks."""

    blocks_per_chunk = 2


def pool_of(*keys):
    """A pool with a block for each key, none of them in use."""
    return SimpleNamespace(
        _block_id_to_key=dict(enumerate(keys, 1)),
        _cached_blocks={key: {number: object()} for number, key in enumerate(keys, 1)},
        _evictable_blocks=OrderedDict.fromkeys(range(1, len(keys) + 1)),
    )


def blocks_of(pool):
    return [Cached(key, block) for block, key in pool._block_id_to_key.items()]


def spill_of(*keys, room=10, known=(b"ab", b"cd")):
    """A spill of a pool whose chunks are known; ``b"ab"`` is that of a and b."""
    spill = Spill(Pairs(room), pool_of(*keys))
    for chunk in known:
        spill.chunks.add([chunk[:1], chunk[1:]])
    return spill


def test_a_chunk_is_stored_with_its_blocks_in_their_order():
    spill = spill_of(b"b", b"a", b"c", b"d")
    spill.begin(blocks_of(spill.pool))
    assert spill.next() == [
        Chunk(b"b", (Cached(b"a", 2), Cached(b"b", 1))),
        Chunk(b"d", (Cached(b"c", 3), Cached(b"d", 4))),
    ]
    assert (spill.count.resident, spill.count.missing, spill.count.partial) == (4, 4, 0)
    spill.planned([b"b"])
    assert (spill.count.planned, spill.counts.spilled["suspend"]) == (2, 2)


def test_what_fills_no_chunk_is_stored_by_nobody():
    spill = spill_of(b"a", b"b", b"c", b"e")
    spill.begin(blocks_of(spill.pool))
    assert [one.key for one in spill.next()] == [b"b"]
    assert spill.count.partial == 2
    assert spill.plan(blocks_of(spill.pool)) == {"resident": 4, "kept": 2, "partial": 2, "lost": 0}
    assert [spill.is_partial(key) for key in (b"a", b"c", b"e")] == [False, True, True]
    assert not spill.lost() - 2  # a and b are not there yet
    spill.tier.blocks[b"b"] = ""
    assert (spill.kept(), spill.lost()) == (2, 0)


def test_a_part_of_a_chunk_that_is_in_the_tier_is_not_lost():
    spill = spill_of(b"a")
    spill.tier.blocks[b"b"] = ""
    spill.begin(blocks_of(spill.pool))
    assert (spill.waits, spill.kept(), spill.count.partial) == (False, 1, 0)
    assert spill.holds(b"a")


def test_room_is_of_chunks():
    spill = spill_of(b"a", b"b", b"c", b"d", room=1)
    assert spill.plan(blocks_of(spill.pool))["lost"] == 2
    spill.begin(blocks_of(spill.pool))
    assert [one.key for one in spill.next()] == [b"b"]
    spill.add(blocks_of(spill.pool))
    assert [one.key for one in spill.next()] == [b"b"]


def test_blocks_taken_up_later_bring_their_chunk():
    spill = spill_of(b"a", b"b", b"c", b"d")
    spill.begin([Cached(b"a", 1)])
    spill.add([Cached(b"c", 3)])
    assert [one.key for one in spill.next()] == [b"b", b"d"]
    assert not spill.settled([b"c"])
    del spill.pool._block_id_to_key[4]  # a block of it is evicted
    assert [one.key for one in spill.next()] == [b"b"]
    assert spill.settled([b"c"])


def test_requests_that_part_within_a_chunk_have_both():
    spill = spill_of(b"a", b"b", b"x", known=(b"ab", b"ax"))
    spill.begin(blocks_of(spill.pool))
    assert [one.key for one in spill.next()] == [b"b", b"x"]
    spill.tier.blocks[b"x"] = ""
    assert spill.holds(b"a")


def test_one_block_is_its_own_chunk():
    chunks = Chunks()
    assert chunks.of(b"a") == chunks.blocks(b"a") == (b"a",)


def test_what_nobody_has_is_forgotten(monkeypatch):
    monkeypatch.setattr(module, "_LEAST", 1)
    chunks = Chunks(2)
    chunks._full = 1
    chunks.add([b"a", b"b"])
    assert not chunks.full
    chunks.add([b"c", b"d"])
    assert chunks.full
    chunks.forget({b"c"})
    assert chunks.of(b"a") == ()
    assert chunks.of(b"c") == (b"d",)
    assert not chunks.full


@pytest.fixture
def names(monkeypatch):
    """vLLM's name of a block with its group."""
    base = ModuleType("vllm.v1.kv_offload.base")
    base.make_offload_key = lambda name, group: name + bytes([group])
    monkeypatch.setitem(sys.modules, base.__name__, base)


def planner_of(*groups, **requests):
    """An OffloadingConnector's scheduler with requests, by the hashes of their blocks."""
    return SimpleNamespace(
        config=SimpleNamespace(kv_group_configs=[SimpleNamespace(group_idx=one) for one in groups]),
        _req_status={
            name: SimpleNamespace(req=SimpleNamespace(block_hashes=hashes))
            for name, hashes in requests.items()
        },
        _current_batch_load_jobs={},
    )


def test_the_chunks_of_requests_are_noted_in_every_step(names):
    planner = planner_of(0, 1, one=[b"a", b"b", b"c"])
    spill = state.attach(planner, Spill(Pairs(10), pool_of()))
    step = ("step",)
    offloading.around_store_jobs(lambda output: {}, planner, step, {})
    assert spill.chunks.of(b"a\0") == (b"b\0",)
    assert spill.chunks.blocks(b"b\1") == (b"a\1", b"b\1")
    assert spill.chunks.of(b"c\0") == ()
    planner._req_status["one"].req.block_hashes.append(b"d")
    offloading.around_store_jobs(lambda output: {}, planner, step, {})
    assert spill.chunks.blocks(b"d\0") == (b"c\0", b"d\0")
    del planner._req_status["one"]
    offloading.around_store_jobs(lambda output: {}, planner, step, {})
    assert spill.chunks.noted == {}
    assert spill.chunks.of(b"a\0") == (b"b\0",)  # its blocks may be on the device for long


def test_chunks_of_requests_that_are_there_are_not_forgotten(names):
    planner = planner_of(0, one=[b"a", b"b"], two=[b"c", b"d"])
    chunks = Chunks(2)
    chunks._full = 1
    offloading.note(planner, chunks, SimpleNamespace(_block_id_to_key={}))
    assert chunks.full
    offloading.note(planner, chunks, SimpleNamespace(_block_id_to_key={}))
    assert chunks.of(b"a\0") == (b"b\0",)
    assert chunks.of(b"c\0") == (b"d\0",)


def test_an_idle_engine_gives_back_what_fills_no_chunk(worlds):
    """Else a page with the end of a prompt would stay for ever."""
    world = worlds(gives=True)
    world.tier.blocks_per_chunk = 2
    world.spill.chunks = Chunks(2)
    for number, name in enumerate((b"a", b"b", b"c", b"d"), 4):
        world.pool.cache(number, name)
    world.spill.chunks.add([b"a", b"b"])
    world.tier.blocks[b"b"] = world.pool.content[5]
    world.giving.rest()
    world.giving.advance()
    world.until_idle()
    assert world.pool.used() == set()
    assert world.giving.lost == 2


def test_stores_without_events_are_told_without_them_and_with_hashes(monkeypatch):
    """As vLLM up to 0.29 returns them, which has no hash of a device block at the end of a copy."""
    spill = Spill(Store(10), pool_of(b"a"))
    scheduler = SimpleNamespace(_lazy_mode=False)
    state.attach(scheduler, spill)
    spill.begin(blocks_of(spill.pool))
    device = {1: SimpleNamespace(block_hash=b"a"), 3: SimpleNamespace(block_hash=b"own")}
    host = {4: SimpleNamespace(_block_hash=b"own"), 7: SimpleNamespace(_block_hash=None)}
    scheduler._gpu_block_pool = SimpleNamespace(blocks=device)
    scheduler.cpu_block_pool = SimpleNamespace(blocks=host)
    monkeypatch.setattr(simple, "store", lambda *given: {1: 7})
    told = fixes.around_store_specs(lambda output: ([3], [4], ["r"]), scheduler, ("s",), {})
    assert told == ([3, 1], [4, 7], ["r"])
    assert [host[place]._block_hash for place in (4, 7)] == [b"own", b"a"]


def test_a_pool_with_vllms_own_index_has_none_beside_it():
    """As kvcached's is from vLLM 0.30 on: what is there is stored all the same."""
    keys = (b"one", b"two")
    pool = pool_of(*keys)
    pool._cached_blocks.clear()
    index = {key: SimpleNamespace(block_id=number) for number, key in enumerate(keys, 1)}
    pool.cached_block_hash_to_block = SimpleNamespace(get_one_block=index.get)
    spill = Spill(Store(10), pool)
    spill.begin(blocks_of(pool))
    assert (spill.count.missing, spill.count.partial) == (2, 0)
    assert [one.blocks for one in spill.next()] == [(one,) for one in blocks_of(pool)]
    del index[b"two"]
    assert spill.plan(blocks_of(pool))["partial"] == 1
