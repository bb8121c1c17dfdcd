"""CPU tiers of SimpleCPUOffloadConnector in a host pool, on real engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from harness.engines.fixtures import MODES, PAIRS
from harness.engines.oracle import PLAIN, Engine, assert_same, assert_same_round, cached
from harness.engines.pools import TWO_RANKS, Pooled, agrees, is_gone, live, name_of, pool_of
from harness.engines.runs import Run, block_bytes
from kvpatch.environ import HOST_POOL
from kvpatch.pool import ledger

MIB = 1 << 20
NAME = name_of("simple")
POOL = ((HOST_POOL.name, f"256MiB@{NAME}"),)  # extents of 4 MiB
Start = Callable[..., Pooled]


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Iterator[None]:
    yield
    assert ledger.show(ledger.home(NAME), remove=True) is None
    if ledger.home(NAME).exists():
        ledger.home(NAME).rmdir()


def tokens(records: list[Any]) -> list[Any]:
    """What prompts were answered with."""
    return [one["tokens"] for one in records]


@PAIRS
def test_prompts_from_a_tier_in_a_pool_give_plain_vllms_tokens(
    engine: Engine, mode: str, model: str, contiguous: bool
) -> None:
    run = Run(model=model, simple=mode, contiguous=contiguous)
    ours = engine(replace(run, environment=POOL))
    assert_same(ours, engine(replace(PLAIN, model=model)))
    assert "pool.simple_tensors" in ours.result["patches"]
    copies = ours.result["simple"]
    assert (copies["changed"], copies["twice"], copies["pinned"]) == (0, [], 0)
    assert copies["device_calls"] == {}
    if model == "llama":  # each mode once
        # What waits for memory is stored later, or not at all.
        assert cached(ours.round(1)) >= cached(engine(run).round(1)) * 0.9


@MODES
def test_a_pool_smaller_than_the_load_evicts_and_stays_right(engine: Engine, mode: str) -> None:
    size = 100 * block_bytes(Run())
    name = f"{NAME}small{mode}"
    ours = engine(Run(simple=mode, environment=((HOST_POOL.name, f"{size}@{name}"),)))
    assert_same(ours, engine(PLAIN))
    copies = ours.result["simple"]
    assert (copies["changed"], copies["twice"], copies["pinned"]) == (0, [], 0)
    assert copies["evicted"] > 0
    assert ledger.show(ledger.home(name), remove=True) is None
    ledger.home(name).rmdir()


# The keeper sees extents, whose blocks are larger with the other model.
@pytest.mark.parametrize(("mode", "model"), [("eager", "sliding"), ("lazy", "llama")])
def test_memory_is_committed_on_use_and_given_back(
    start_in_pool: Start, engine: Engine, mode: str, model: str
) -> None:
    name = f"use{mode}{model}"
    one = start_in_pool(replace(pool_of(256 * MIB, name, mode), model=model))
    plain = engine(replace(PLAIN, model=model)).round(0)
    for records in live(one, model):
        assert_same_round(records, plain)
    is_gone(name, one)


def test_the_start_takes_no_more_for_a_larger_tier(start_in_pool: Start) -> None:
    size = 8 << 30  # which a machine has free while other tests run
    one = start_in_pool(replace(pool_of(size, "wide", "eager"), cpu_blocks=1 << 15))
    seen = one.do("see")
    assert agrees(seen, simple=True), seen
    assert seen["ceiling"] >= size - 2 * block_bytes(Run())  # the null block has none
    assert seen["committed"] <= seen["extent"]
    is_gone("wide", one)


# The modes differ in when they store, and a layout in where a rank's part is read.
@pytest.mark.parametrize(("mode", "contiguous"), [("eager", False), ("lazy", True)])
def test_every_rank_has_its_part_of_an_extent(
    start_in_pool: Start, mode: str, contiguous: bool
) -> None:
    name = f"parts{mode}{contiguous}"
    run = replace(pool_of(256 * MIB, name, mode), contiguous=contiguous)
    one = start_in_pool(run, **TWO_RANKS)
    first = one.do("round", "few")
    full = one.do("see")
    one.do("round", "back")
    again = one.do("round", "few")
    one.do("reset")
    empty = one.do("see")
    for seen in (full, empty):
        assert agrees(seen, simple=True), seen
    assert len(full["ranks"]) == 2
    assert empty["committed"] <= empty["extent"]
    assert tokens(again) == tokens(first)
    assert cached(again) > 0
    is_gone(name, one)


def test_an_idle_engine_makes_room_for_another_connectors(
    start_in_pool: Start, engine: Engine
) -> None:
    """One engine of each connector, which count alike."""
    size = 48 * MIB
    one = start_in_pool(pool_of(size, "mixed", "eager"))
    one.do("round", "8")
    full = one.do("see")
    assert agrees(full, simple=True), full
    assert full["committed"] > size // 2
    two = start_in_pool(pool_of(size, "mixed"))
    two.do("round", "8")
    shared = two.do("see")
    assert shared["engines"] == 2
    assert shared["records"] <= size
    assert shared["committed"] > full["extent"], "the other engine, which is idle, gave nothing"
    given = one.do("see")
    assert agrees(given | {"limit": size}, simple=True), given
    assert given["evicted"] > 0
    assert tokens(one.do("round", "8")) == tokens(engine(PLAIN).round(0)[:8])
    one.kill()
    two.do("alone")
    assert tokens(two.do("round", "8")) == tokens(engine(PLAIN).round(0)[:8])
    is_gone("mixed", two)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_memory_of_a_killed_engine_is_there_for_the_next(
    start_in_pool: Start, ranks: int
) -> None:
    more = TWO_RANKS if ranks == 2 else {}
    name = f"next{ranks}"
    run = pool_of(48 * MIB, name, "eager")
    one = start_in_pool(run, **more)
    first = one.do("round", "few")
    assert one.do("see")["committed"] > 20 * MIB
    one.kill()
    following = start_in_pool(run, **more)
    begun = following.do("see")
    assert begun["engines"] == 1
    assert begun["records"] == begun["committed"] <= begun["extent"]
    assert tokens(following.do("round", "few")) == tokens(first)
    seen = following.do("see")
    assert agrees(seen, simple=True), seen
    is_gone(name, following)
