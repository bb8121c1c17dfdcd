"""KV cache events of kvcached's block pool: what each wrapper adds."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

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


@pytest.mark.parametrize(("done", "on"), [(True, True), (True, False), (False, True)])
def test_a_reset_is_one_event(monkeypatch, done, on):
    module = ModuleType("vllm.distributed.kv_events")
    module.AllBlocksCleared = lambda: "cleared"
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
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
