"""The simple connector's lazy walk over kvcached's blocks, by cached blocks."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from parts import sizes

from kvpatch.patches.simple_offload.eviction import EvictionOrder

TARGET = 128  # blocks that two steps can take


def order(cached: int) -> EvictionOrder:
    """An order over so many cached blocks, none of them offered yet, and no free memory."""
    blocks = {
        number: SimpleNamespace(block_id=number, block_hash=number, ref_cnt=0, is_null=False)
        for number in range(1, cached + 1)
    }
    pool = SimpleNamespace(
        _evictable_blocks=blocks,
        max_cached_blocks=-1,
        kv_cache_manager=SimpleNamespace(available_size=lambda: 0),
    )
    tier = SimpleNamespace(
        blocks=[], cached_block_hash_to_block=SimpleNamespace(get_one_block=lambda _: None)
    )
    planner = SimpleNamespace(
        _target_free=TARGET,
        cp_world_size=1,
        cpu_kv_cache_config=SimpleNamespace(kv_cache_groups=[]),
        cpu_block_pool=tier,
        _store_event_to_blocks={},
    )
    return EvictionOrder(planner, pool)


def count(walk: Any) -> int:
    return sum(1 for _ in walk)


@pytest.mark.parametrize("cached", sizes(1000, 10000, 100000))
def test_the_whole_queue(part, cached):
    walked = part(
        "queue view: the whole walk",
        cached,
        "blocks",
        lambda made: count(made.iter_blocks_after(None)),
        setup=lambda: (order(cached),),
    )
    assert walked == cached


@pytest.mark.parametrize("cached", sizes(1000, 10000, 100000))
def test_a_step(part, cached):
    """As far as a step walks: to the connector's target."""
    walked = part(
        "queue view: the walk of a step",
        cached,
        "blocks",
        lambda made: count(islice(made.iter_blocks_after(None), TARGET)),
        setup=lambda: (order(cached),),
    )
    assert walked == TARGET
