"""A CPU tier in a host pool with a disk behind it, or inside MultiConnector, on real engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engines.fixtures import MODEL_PAIRS
from harness.engines.oracle import PLAIN, Engine, assert_same, assert_same_round
from harness.engines.pools import TWO_RANKS, Pooled, agrees, is_gone, live, name_of, pool_of
from harness.engines.runs import ALL, Run
from harness.engines.tiers import (
    APART,
    PATIENT,
    SAME_HASHES,
    SMALL,
    Serve,
    answers,
    assert_comes_back,
    assert_plain,
    hits,
    on,
)
from kvpatch.environ import HOST_POOL
from kvpatch.pool import ledger

MIB = 1 << 20
NAME = name_of("behind")
POOL = (HOST_POOL.name, f"256MiB@{NAME}")  # extents of 4 MiB
INSIDE = ("OffloadingConnector",)
Start = Callable[..., Pooled]


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Iterator[None]:
    yield
    assert ledger.show(ledger.home(NAME), remove=True) is None
    if ledger.home(NAME).exists():
        ledger.home(NAME).rmdir()


def in_pool(run: Run) -> Run:
    return replace(run, environment=(*run.environment, POOL))


def with_disk(size: int, name: str, disk: Path) -> Run:
    """An engine in a pool of a size and a name of its own, with a disk behind its tier."""
    run = pool_of(size, name)
    return replace(run, tiers=(str(disk),), environment=(*run.environment, SAME_HASHES, PATIENT))


@MODEL_PAIRS
def test_prompts_that_a_pool_evicted_come_back_from_disk(
    serve: Serve, engine: Engine, tmp_path: Path, model: str, contiguous: bool
) -> None:
    run = in_pool(on(tmp_path, model=model, contiguous=contiguous))
    finished = serve(run, times=2, watch=True, engine=SMALL[model])
    assert_comes_back(finished, engine(replace(PLAIN, model=model)))
    assert any(patch.startswith("pool.") for patch in finished.result["patches"])


@pytest.mark.parametrize("of_disk", ["pool", "own"])
def test_a_tier_in_a_pool_and_one_of_its_own_read_one_disk(
    serve: Serve, engine: Engine, tmp_path: Path, of_disk: str
) -> None:
    """A file's identity is not that of the memory it was written from."""
    run = on(tmp_path)
    first, then = (in_pool(run), run) if of_disk == "pool" else (run, in_pool(run))
    answers(serve(first))
    records = answers(serve(then))
    assert_plain(records, engine(PLAIN))
    assert hits(records) == [640] * APART


def test_memory_is_given_back_with_a_disk_behind_it(
    start_in_pool: Start, engine: Engine, tmp_path: Path
) -> None:
    run = with_disk(256 * MIB, "disk", tmp_path)
    one = start_in_pool(run)
    plain = engine(PLAIN).round(0)
    first, again, last = live(one, run.model)
    for records in (first, again, last):
        assert_same_round(records, plain)
    # What the tier had to give back is on the disk.
    assert sum(record["cached"] for record in last) > 0
    is_gone("disk", one)


def test_the_tiers_of_two_ranks_are_given_back_with_a_disk_behind_them(
    start_in_pool: Start, tmp_path: Path
) -> None:
    run = with_disk(256 * MIB, "both", tmp_path)
    one = start_in_pool(run, **TWO_RANKS)
    first = one.do("round", "few")
    full = one.do("see")
    one.do("reset")
    empty = one.do("see")
    again = one.do("round", "few")
    assert agrees(full), full
    assert agrees(empty), empty
    assert empty["committed"] <= empty["extent"]
    assert [record["tokens"] for record in again] == [record["tokens"] for record in first]
    is_gone("both", one)


def test_after_a_kill_the_next_engine_is_served_from_the_disk(
    start_in_pool: Start, tmp_path: Path
) -> None:
    run = with_disk(48 * MIB, "next", tmp_path)
    one = start_in_pool(run)
    first = one.do("round", "few")
    one.kill()
    following = start_in_pool(run)
    begun = following.do("see")
    assert begun["engines"] == 1
    assert begun["committed"] <= begun["extent"]
    again = following.do("round", "few")
    assert [record["tokens"] for record in again] == [record["tokens"] for record in first]
    assert sum(record["cached"] for record in again) > 0
    is_gone("next", following)


@pytest.mark.parametrize("model", ["llama", "sliding"])
def test_prompts_come_back_from_a_pool_through_a_multi_connector(
    engine: Engine, model: str
) -> None:
    ours = engine(in_pool(Run(model=model, inside=INSIDE)))
    assert_same(ours, engine(replace(PLAIN, model=model)))
    assert [record["cached"] for record in ours.round(1)] == [640] * ALL
    assert ours.result["changed"] == []


def test_memory_is_given_back_inside_a_multi_connector(
    start_in_pool: Start, engine: Engine
) -> None:
    one = start_in_pool(replace(pool_of(256 * MIB, "inside"), inside=INSIDE))
    plain = engine(PLAIN).round(0)
    for records in live(one, "llama"):
        assert_same_round(records, plain)
    is_gone("inside", one)
