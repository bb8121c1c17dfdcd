"""CPU tiers of real engines in a host pool: tokens, bytes and memory, alone and with others.

A kind is a connector, what is around it or behind it, and a model.
"""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engines.fixtures import MODEL_PAIRS, MODELS, PAIRS
from harness.engines.oracle import PLAIN, assert_same, assert_same_round, cached
from harness.engines.pools import TWO_RANKS, Pooled, agrees, is_gone, live, name_of, pool_of, share
from harness.engines.runs import ALL, Run, block_bytes
from harness.engines.serving import eventually
from harness.engines.tiers import (
    PATIENT,
    SAME_HASHES,
    SMALL,
    answers,
    assert_comes_back,
    assert_found,
    on,
)
from kvpatch.environ import HOST_POOL
from kvpatch.pool import ledger

MIB = 1 << 20
NAME = name_of("")
POOL = {HOST_POOL.name: f"256MiB@{NAME}"}  # extents of 4 MiB
INSIDE = ("OffloadingConnector",)
TRIES = 60

# Their names are those of pools too, of letters alone.
KINDS: dict[str, dict[str, Any]] = {
    "offloading": {},
    "sliding": {"model": "sliding"},
    "eager": {"simple": "eager"},
    "eagersliding": {"simple": "eager", "model": "sliding"},
    "eagerapart": {"simple": "eager", "contiguous": False},
    "lazy": {"simple": "lazy"},
    "disk": {},  # and a folder
    "inside": {"inside": INSIDE},
}


def of_kind(kind: str, size: int, name: str, disk: Path) -> Run:
    """An engine of a kind in a pool of a size and a name of its own."""
    run = replace(pool_of(size, name), **KINDS[kind])
    if kind == "disk":
        run = replace(run, tiers=(str(disk),)).within(SAME_HASHES | PATIENT)
    return run


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left():
    """What was in memory before the tests is there after them, and no more."""
    yield
    assert ledger.show(ledger.home(NAME), remove=True) is None
    for folder in Path("/dev/shm").glob(f"{ledger.home(NAME).name}*"):
        assert list(folder.iterdir()) == []
        folder.rmdir()


def tokens(records: list[Any]) -> list[Any]:
    """What prompts were answered with."""
    return [one["tokens"] for one in records]


# Tokens and bytes


@MODELS
@pytest.mark.parametrize("inside", [(), INSIDE], ids=["alone", "inside"])
def test_prompts_from_a_tier_in_a_pool_give_plain_vllms_tokens(engine, model, inside):
    ours = engine(Run(model=model, inside=inside).within(POOL))
    assert_same(ours, engine(replace(PLAIN, model=model)))
    assert [record["cached"] for record in ours.round(1)] == [640] * ALL
    assert ours.result["changed"] == []
    assert any(patch.startswith("host_pool.") for patch in ours.result["patches"])


@PAIRS
def test_so_they_do_from_the_simple_connectors(engine, mode, model, contiguous):
    run = Run(model=model, simple=mode, contiguous=contiguous)
    ours = engine(run.within(POOL))
    assert_same(ours, engine(replace(PLAIN, model=model)))
    assert "host_pool.simple_tensors" in ours.result["patches"]
    copies = ours.result["simple"]
    assert (copies["changed"], copies["twice"], copies["pinned"]) == (0, [], 0)
    assert copies["device_calls"] == {}
    if model == "llama":  # each mode once
        # What waits for memory is stored later, or not at all.
        assert cached(ours.round(1)) >= cached(engine(run).round(1)) * 0.9


@MODEL_PAIRS
def test_prompts_that_a_pool_evicted_come_back_from_disk(
    serve, engine, tmp_path, model, contiguous
):
    run = on(tmp_path, model=model, contiguous=contiguous).within(POOL)
    finished = serve(run, times=2, watch=True, engine=SMALL[model])
    assert_comes_back(finished, engine(replace(PLAIN, model=model)))
    assert any(patch.startswith("host_pool.") for patch in finished.result["patches"])


@pytest.mark.parametrize("of_disk", ["pool", "own"])
def test_a_tier_in_a_pool_and_one_of_its_own_read_one_disk(serve, engine, tmp_path, of_disk):
    """A file's identity is not that of the memory it was written from."""
    run = on(tmp_path)
    first, then = (run.within(POOL), run) if of_disk == "pool" else (run, run.within(POOL))
    answers(serve(first))
    assert_found(serve(then), engine(PLAIN))


@pytest.mark.parametrize("mode", ["", "eager", "lazy"])
def test_a_pool_smaller_than_the_load_evicts_and_stays_right(engine, mode):
    name = f"{NAME}small{mode}"
    size = 100 * block_bytes(Run())
    ours = engine(Run(simple=mode).within({HOST_POOL.name: f"{size}@{name}"}))
    assert_same(ours, engine(PLAIN))
    copies = ours.result["simple"] if mode else ours.result
    assert copies["evicted"] > 0
    assert not copies["changed"]
    if mode:
        assert (copies["twice"], copies["pinned"]) == ([], 0)
    assert ledger.show(ledger.home(name), remove=True) is None
    ledger.home(name).rmdir()


# Memory


# The keeper sees extents, whose blocks are larger with the other model.
@pytest.mark.parametrize(
    "kind", ["offloading", "sliding", "eagersliding", "lazy", "disk", "inside"]
)
def test_memory_is_committed_on_use_and_given_back(start_in_pool, engine, tmp_path, kind):
    run = of_kind(kind, 256 * MIB, kind, tmp_path)
    one = start_in_pool(run)
    plain = engine(replace(PLAIN, model=run.model)).round(0)
    rounds = live(one, run.model)
    for records in rounds:
        assert_same_round(records, plain)
    if kind == "disk":  # which has what the tier had to give back
        assert cached(rounds[-1]) > 0
    is_gone(kind, one)


@pytest.mark.parametrize("kind", ["offloading", "eager"])
def test_the_start_takes_no_more_for_a_larger_tier(start_in_pool, tmp_path, kind):
    """Of 8 GiB in a pool that may have as much: what is committed, mapped and registered."""
    size = 8 << 30  # which a machine has free while other tests run
    run = of_kind(kind, size, f"large{kind}", tmp_path)
    one = start_in_pool(replace(run, cpu_blocks=1 << 15))
    seen = one.do("see")
    assert agrees(seen, one.simple), seen
    # The simple connector's null block has no memory.
    assert size >= seen["ceiling"] >= size - one.simple * 2 * block_bytes(Run())
    assert seen["committed"] <= seen["extent"]
    assert one.simple or seen["extent"] == 64 * MIB
    is_gone(f"large{kind}", one)


# The modes differ in when they store, and a layout in where a rank's part is read.
@pytest.mark.parametrize("kind", ["offloading", "eagerapart", "lazy", "disk"])
def test_every_rank_has_its_part_of_an_extent(start_in_pool, tmp_path, kind):
    one = start_in_pool(of_kind(kind, 256 * MIB, f"ranks{kind}", tmp_path), **TWO_RANKS)
    first = one.do("round", "few")
    full = one.do("see")
    one.do("round", "back")
    again = one.do("round", "few")
    one.do("reset")
    empty = one.do("see")
    for seen in (full, empty):
        assert agrees(seen, one.simple), seen
    assert len(full["ranks"]) == 2
    assert empty["committed"] <= empty["extent"]
    assert tokens(again) == tokens(first)
    assert cached(again) > 0
    is_gone(f"ranks{kind}", one)


# Two engines of one pool


@pytest.mark.parametrize("kind", ["offloading", "eager"])
def test_an_idle_engine_makes_room_and_a_killed_one_leaves_it(
    start_in_pool, engine, tmp_path, kind
):
    """A pool of 48 MiB, in which tiers of both connectors count alike."""
    runs = [of_kind(one, 48 * MIB, f"two{kind}", tmp_path) for one in (kind, "offloading")]
    share(start_in_pool, runs, 48 * MIB, engine(PLAIN).round(0))


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
@pytest.mark.parametrize("kind", ["offloading", "eager", "disk"])
def test_the_memory_of_a_last_engine_that_is_killed_is_there_for_the_next(
    start_in_pool, tmp_path, kind, ranks
):
    more = TWO_RANKS if ranks == 2 else {}
    name = f"killed{kind}{ranks}"
    run = of_kind(kind, 48 * MIB, name, tmp_path)
    one = start_in_pool(run, **more)
    first = one.do("round", "few")
    assert one.do("see")["committed"] > 20 * MIB
    tiers = tiers_of(one.pid) if kind == "offloading" else set()
    if kind == "offloading":
        assert len(tiers) == 1
        assert len(users(tiers)) == (1 if ranks == 1 else 1 + ranks)
    one.kill()
    assert eventually(lambda: ledger.show(ledger.home(name_of(name))) is None, 60)
    assert users(tiers) == set()
    following = start_in_pool(run, **more)
    begun = following.do("see")
    assert begun["engines"] == 1
    assert begun["records"] == begun["committed"] <= begun["extent"]
    again = following.do("round", "few")
    assert tokens(again) == tokens(first)
    if kind == "disk":
        assert cached(again) > 0
    seen = following.do("see")
    assert agrees(seen, following.simple), seen
    assert seen["committed"] > 20 * MIB
    is_gone(name, following)


# What is shown


def said(one: Pooled, *words: str) -> Any:
    """What a command of kvpatch prints beside an engine, as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "kvpatch", *words, "--json"],
        env=one.environment | {"KVPATCH": "0"},
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


def test_status_and_pool_show_what_an_engine_has(start_in_pool):
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
