"""CPU tiers of real engines in a host pool: tokens, bytes and memory, alone and with others."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engines.fixtures import MODELS
from harness.engines.oracle import PLAIN, Engine, assert_same, assert_same_round
from harness.engines.pools import TWO_RANKS, Pooled, agrees, is_gone, live, name_of, pool_of
from harness.engines.runs import ALL, Run, block_bytes, python_of
from kvpatch.environ import HOST_POOL
from kvpatch.pool import ledger

MIB = 1 << 20
NAME = name_of("")
POOL = ((HOST_POOL.name, f"256MiB@{NAME}"),)  # extents of 4 MiB


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Iterator[None]:
    """What was in memory before the tests is there after them, and no more."""
    yield
    assert ledger.show(ledger.home(NAME), remove=True) is None
    for folder in Path("/dev/shm").glob(f"{ledger.home(NAME).name}*"):
        assert list(folder.iterdir()) == []
        folder.rmdir()


@MODELS
def test_prompts_from_a_tier_in_a_pool_give_plain_vllms_tokens(engine: Engine, model: str) -> None:
    ours = engine(Run(model=model, environment=POOL))
    assert_same(ours, engine(replace(PLAIN, model=model)))
    assert [record["cached"] for record in ours.round(1)] == [640] * ALL
    assert ours.result["changed"] == []
    assert any(patch.startswith("pool.") for patch in ours.result["patches"])


def test_a_pool_smaller_than_the_load_evicts_and_stays_right(engine: Engine) -> None:
    size = 100 * block_bytes(Run())
    small = ((HOST_POOL.name, f"{size}@{NAME}small"),)
    ours = engine(Run(environment=small))
    assert_same(ours, engine(PLAIN))
    assert ours.result["evicted"] > 0
    assert ours.result["changed"] == []
    assert ledger.show(ledger.home(f"{NAME}small"), remove=True) is None
    ledger.home(f"{NAME}small").rmdir()


Start = Callable[..., Pooled]
TRIES = 60


def tokens(records: list[Any]) -> list[Any]:
    """What prompts were answered with."""
    return [one["tokens"] for one in records]


@MODELS
def test_memory_is_committed_on_use_and_given_back(
    start_in_pool: Start, engine: Engine, model: str
) -> None:
    one = start_in_pool(replace(pool_of(256 * MIB, "use"), model=model))
    plain = engine(replace(PLAIN, model=model)).round(0)
    for records in live(one, model):
        assert_same_round(records, plain)
    is_gone("use", one)


def test_the_start_takes_no_more_for_a_larger_tier(start_in_pool: Start) -> None:
    """Of 8 GiB in a pool that may have as much: what is committed, mapped and registered."""
    size = 8 << 30  # which a machine has free while other tests run
    one = start_in_pool(replace(pool_of(size, "large"), cpu_blocks=1 << 15))
    seen = one.do("see")
    assert agrees(seen), seen
    assert seen["ceiling"] == size
    assert seen["committed"] <= seen["extent"] == 64 * MIB
    is_gone("large", one)


def test_every_rank_has_the_same_extents(start_in_pool: Start) -> None:
    one = start_in_pool(pool_of(256 * MIB, "ranks"), **TWO_RANKS)
    first = one.do("round", "few")
    full = one.do("see")
    one.do("round", "back")
    again = one.do("round", "few")
    one.do("reset")
    empty = one.do("see")
    assert agrees(full), full
    assert agrees(empty), empty
    assert len(full["ranks"]) == 2
    assert empty["committed"] <= empty["extent"]
    assert tokens(again) == tokens(first)
    assert sum(one["cached"] for one in again) > 0
    is_gone("ranks", one)


def test_an_idle_engine_makes_room_and_a_killed_one_leaves_it(
    start_in_pool: Start, engine: Engine
) -> None:
    """A pool of 48 MiB: two prompts of 5 MiB each fill a fifth of it."""
    size = 48 * MIB
    one = start_in_pool(pool_of(size, "two"))
    one.do("round", "8")
    full = one.do("see")
    assert agrees(full), full
    assert full["committed"] > size // 2
    two = start_in_pool(pool_of(size, "two"))
    two.do("round", "8")
    shared = two.do("see")
    assert shared["engines"] == 2
    assert shared["records"] <= size
    assert shared["committed"] > full["extent"], "the other engine, which is idle, gave nothing"
    one.kill()
    two.do("alone")
    left = two.do("see")
    assert (left["resident"], left["evicted"]) == (shared["resident"], shared["evicted"])
    two.do("round", "8")
    again = two.do("round", "8")
    last = two.do("see")
    assert last["engines"] == 1
    assert agrees(last), last
    assert last["records"] == last["committed"] > size // 2
    plain = engine(PLAIN).round(0)[:8]
    assert tokens(again) == tokens(plain)
    assert sum(one["cached"] for one in again) > 0
    is_gone("two", two)


def tiers_of(pid: int) -> set[tuple[int, int]]:
    """The CPU tiers that a process keeps alive, without a name: device and number of each file."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        link = str(path.readlink())
        if link.startswith("/dev/shm/vllm_offload_"):
            assert link.endswith(" (deleted)")
            stat = path.stat()
            found.add((stat.st_dev, stat.st_ino))
    return found


def users(tiers: set[tuple[int, int]]) -> set[int]:
    """The processes that keep a file alive: who has it open, or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for path in (*process.glob("fd/*"), *process.glob("map_files/*")):
                with suppress(OSError):
                    stat = path.stat()
                    if (stat.st_dev, stat.st_ino) in tiers:
                        found.add(int(process.name))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_memory_of_a_last_engine_that_is_killed_is_there_for_the_next(
    start_in_pool: Start, ranks: int
) -> None:
    more = TWO_RANKS if ranks == 2 else {}
    run = pool_of(48 * MIB, f"killed{ranks}")
    folder = ledger.home(name_of(f"killed{ranks}"))
    one = start_in_pool(run, **more)
    first = one.do("round", "few")
    full = one.do("see")
    assert full["committed"] > 20 * MIB
    tiers = tiers_of(one.pid)
    assert len(tiers) == 1
    assert len(users(tiers)) == (1 if ranks == 1 else 1 + ranks)
    one.kill()
    until(lambda: ledger.show(folder) is None)  # nothing of it counts any more
    assert users(tiers) == set()
    next_one = start_in_pool(run, **more)
    begun = next_one.do("see")
    assert begun["engines"] == 1
    assert begun["records"] == begun["committed"] <= begun["extent"]
    assert tokens(next_one.do("round", "few")) == tokens(first)
    again = next_one.do("see")
    assert agrees(again), again
    assert again["committed"] > 20 * MIB
    is_gone(f"killed{ranks}", next_one)


def said(one: Pooled, *words: str, **environment: str) -> Any:
    """What a command of kvpatch prints beside an engine, as JSON."""
    done = subprocess.run(
        [python_of(""), "-m", "kvpatch", *words, "--json"],
        env=one.environment | {"KVPATCH": "0"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr  # 1: also of engines that other tests killed
    return json.loads(done.stdout)


def shown_of(one: Pooled) -> dict[str, Any]:
    """What ``kvpatch status`` shows of an engine's host pool."""
    processes = said(one, "status")["processes"]
    (found,) = (each["engine"]["host_pool"] for each in processes if each["pid"] == one.pid)
    return dict(found)


def test_status_and_pool_show_what_an_engine_has(start_in_pool: Start) -> None:
    one = start_in_pool(pool_of(256 * MIB, "shown"))
    first = one.do("round", "few")
    names = ("committed", "resident", "ceiling", "limit", "engines", "evicted", "broken")

    def is_told() -> bool:
        """Both commands say what the engine says; the page of status is of its last beat."""
        seen, shown, pool = one.do("see"), shown_of(one), said(one, "pool")
        (owner,) = pool["engines"]
        return (
            all(shown[name] == seen[name] for name in names)
            and (pool["limit"], pool["committed"]) == (seen["limit"], seen["committed"])
            and (owner["resident"], owner["state"]) == (seen["resident"], "")
        )

    assert any(is_told() for _ in range(TRIES))
    said(one, "pool", "8MiB")
    one.do("limit", 8 * MIB)
    assert any(is_told() for _ in range(TRIES))
    assert shown_of(one)["limit"] == 8 * MIB
    assert tokens(one.do("round", "few")) == tokens(first)
    is_gone("shown", one)


def until(true: Callable[[], bool]) -> None:
    """Wait for what the kernel does."""
    for _ in range(6000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen in a minute")
