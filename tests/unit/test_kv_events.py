"""KV cache events of kvcached's block pool: what each wrapper adds."""

from types import SimpleNamespace

import pytest
from fakes import module

from kvpatch.patch import Kind
from kvpatch.patches import kv_events


def test_events_stay_as_vllm_had_them():
    for wanted in (True, False):
        native = SimpleNamespace(enable_kv_cache_events=wanted)
        coordinator = SimpleNamespace(block_pool=native)

        def replace_pool(coordinator=coordinator):
            coordinator.block_pool = SimpleNamespace(enable_kv_cache_events=False)

        kv_events.carry_the_switch(replace_pool, coordinator, (), {})
        assert coordinator.block_pool.enable_kv_cache_events is wanted
        assert coordinator.block_pool is not native


def test_a_block_that_is_evicted_is_an_event_without_a_wrapper_around_each():
    told = []
    hashes = {1: ["hash"], 2: []}
    pool = SimpleNamespace(
        blocks=["null", "first", "second"],
        _remove_cached_block_hashes=lambda block: hashes[pool.blocks.index(block)],
        _emit_block_removed_events=told.append,
    )
    removing = kv_events.remove(lambda *_: pytest.fail("kvcached's own, which tells nobody"))
    assert removing(pool, b"key", 1) == "first"
    assert removing(pool, b"key", block_id=2) is None
    assert told == [["hash"], []]
    (row,) = (one for one in kv_events.FEATURE.patches if one.id == "kv_events.remove")
    assert row.kind is Kind.REPLACE, "what every block goes through"


@pytest.mark.parametrize(("done", "on"), [(True, True), (True, False), (False, True)])
def test_a_reset_is_one_event(monkeypatch, done, on):
    module(monkeypatch, "vllm.distributed.kv_events", AllBlocksCleared=lambda: "cleared")
    pool = SimpleNamespace(enable_kv_cache_events=on, kv_event_queue=["stored"])

    def reset():
        if on:
            pool.kv_event_queue.append("removed")
        return done

    assert kv_events.reset(reset, pool, (), {}) is done
    if done and on:
        assert pool.kv_event_queue == ["stored", "cleared"]
    else:
        assert "cleared" not in pool.kv_event_queue
