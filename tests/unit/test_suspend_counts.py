"""What is counted of memory that was given back: seconds, blocks spilled, blocks restored."""

from types import SimpleNamespace

import pytest
from suspend_world import BLOCKS, MOST, PAGE, Store, filled
from test_suspend_chunks import pool_of

from kvpatch import state
from kvpatch.environ import FIRST_LIMIT, HOST_POOL
from kvpatch.patches.suspend import offloading, simple
from kvpatch.patches.suspend.counts import Counts
from kvpatch.patches.suspend.spill import Cached, Spill
from kvpatch.patches.suspend.suspension import Phase
from kvpatch.patches.suspend.told import first_limit_bytes
from kvpatch.telemetry.series import Sender
from kvpatch.telemetry.suspended import expected, of

NONE = {"suspend": 0, "limit": 0, "idle": 0}


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(at=1000.0)
    monkeypatch.setattr("kvpatch.patches.suspend.counts.time.monotonic", lambda: now.at)
    return now


def told(world):
    described = of(world)
    assert described == state.of(world, Sender).more(), "the status page and the messages differ"
    return described["suspended"]


def suspend(world):
    world.suspension.suspend(False, False, None)
    world.until_idle()
    assert world.suspension.phase is Phase.SUSPENDED


def resume(world):
    world.suspension.resume()
    world.until_idle()
    assert world.suspension.phase is Phase.RUNS


def test_seconds_are_those_without_memory_and_the_present_ones(worlds, clock):
    world = filled(worlds)
    assert told(world) == {"seconds": 0, "spilled": NONE, "restored": 0}
    world.suspension.suspend(False, False, None)
    for phase in (Phase.STORING, Phase.RELEASING):
        while world.suspension.phase is not phase:
            world.step()
        clock.at += 5
    world.until_idle()
    clock.at += 10
    assert told(world)["seconds"] == 10
    clock.at += 2.5
    world.suspension.resume()
    clock.at += 100
    world.until_idle()
    assert told(world)["seconds"] == 12.5
    suspend(world)
    clock.at += 1
    resume(world)
    assert told(world)["seconds"] == 13.5, "not the sum"


def test_a_suspension_that_is_given_up_is_none(worlds, clock):
    world = filled(worlds)
    world.suspension.suspend(False, False, None)
    world.step()
    assert world.suspension.phase is Phase.STORING
    clock.at += 5
    resume(world)
    assert told(world)["seconds"] == 0


def test_an_engine_that_cannot_be_suspended_has_no_counts(worlds):
    world = filled(worlds)
    bare = SimpleNamespace(scheduler=world.scheduler, manager=world.manager, pool=world.pool)
    assert of(bare) == {}
    type(world.suspension)(bare, None, "it has no tier")
    assert of(bare) == {
        "first_limit_bytes": MOST * PAGE,
        "suspended": None,
        "last_suspension": None,
        "phase": "runs",
    }


def test_what_the_last_suspension_lost_is_told_after_it(worlds):
    world = filled(worlds, room=10)
    assert of(world)["last_suspension"] is None
    suspend(world)
    resume(world)
    assert of(world)["last_suspension"] == {"blocks": 24, "kept": 10}
    suspend(world)
    assert of(world)["last_suspension"] == {"blocks": 0, "kept": 0}


def test_what_the_tier_has_already_is_not_spilled(worlds):
    world = filled(worlds)
    world.tier.blocks[b"old4"] = "bytes of old4"
    suspend(world)
    assert told(world)["spilled"] == NONE | {"suspend": 23}


def test_blocks_are_spilled_for_a_limit_and_at_idle(worlds):
    world = filled(worlds, gives=True)
    world.manager.limit = world.manager.reported = 5 * PAGE
    world.giving.look()
    world.until_idle()
    assert told(world)["spilled"] == NONE | {"limit": 2 * BLOCKS}
    world.giving.rest()
    world.giving.advance()
    world.until_idle()
    assert told(world)["spilled"] == NONE | {"limit": 2 * BLOCKS, "idle": 4 * BLOCKS}


def test_what_is_stored_ahead_at_idle_is_for_a_limit():
    """A limit may come while an idle engine's piece is being stored."""
    spill = Spill(Store(10), pool_of(b"one", b"two"))
    spill.begin([Cached(b"one", 1)], "idle")
    spill.add([Cached(b"two", 2)])
    spill.planned([one.key for one in spill.next()])
    assert spill.counts.spilled == NONE | {"limit": 1, "idle": 1}


def test_stores_of_the_connector_itself_are_not_the_spills():
    spill = Spill(Store(10), pool_of(b"one"))
    spill.begin([Cached(b"one", 1)])
    spill.planned([b"one"], ours=False)
    assert (spill.count.planned, spill.counts.spilled, set(spill.counts.away)) == (1, NONE, set())


def test_a_block_is_restored_once_for_every_time_it_was_spilled():
    counts = Counts(Store(10))
    counts.stored([b"one", b"two"], "suspend")
    for _ in range(2):
        counts.loaded([b"one", b"other"])
    assert counts.restored == 1
    counts.stored([b"one"], "limit")
    counts.loaded([b"one"])
    assert counts.restored == 2
    assert set(counts.away) == {b"two"}
    assert counts.spilled == {"suspend": 2, "limit": 1, "idle": 0}


def test_what_is_remembered_is_what_the_tier_may_still_have():
    tier = Store(room=4)
    counts = Counts(tier)
    for number in range(100):
        key = f"block{number}".encode()
        counts.stored([key], "limit")
        assert len(counts.away) <= 2 * tier.room
        tier.flying.append((number, key, ""))
        tier.step(number)  # two steps later it is stored
    assert counts.away.keys() >= set(tier.blocks) | {key for _, key, _ in tier.flying}


def test_a_step_looks_at_few_of_what_is_remembered():
    tier = Store(room=1000)
    counts, looked = Counts(tier), []
    tier.holds = lambda key: looked.append(key) or False
    for number in range(3000):
        looked.clear()
        counts.stored([f"block{number}".encode()], "limit")
        assert len(looked) <= 3


def test_blocks_that_the_tier_has_no_room_for_are_not_looked_at():
    spill = Spill(Store(0), None)
    spill.begin([])
    spill.add(pytest.fail("each step walks over what cannot be stored") for _ in range(1000))


@pytest.mark.parametrize("size", [1, 2])
def test_the_tier_is_asked_once_for_the_blocks_of_a_page(size):
    tier = Store(10)
    tier.blocks_per_chunk = size
    tier.blocks.update({b"two": "", b"four": ""})
    spill, asked = Spill(tier, None), []
    spill.chunks.add([b"one", b"two"])
    tier.held = lambda keys: asked.append(list(keys)) or [one for one in keys if one in tier.blocks]
    found = spill.held([b"one", b"two", b"three", b"four"])
    assert found == ({b"two", b"four"} if size == 1 else {b"one", b"two"})
    assert len(asked) == (size == 1)


def loading(*keys):
    """An OffloadingConnector's scheduler in a step that loads blocks, and stores none."""
    return SimpleNamespace(
        _current_batch_load_jobs={7: "how"},
        _jobs={7: SimpleNamespace(keys=set(keys)), 6: SimpleNamespace(keys={b"before"})},
    )


def test_loads_of_offloading_connector_are_those_of_the_step():
    planner = loading(b"one", b"other")
    spill = state.attach(planner, Spill(Store(10), None))
    spill.counts.stored([b"one", b"two", b"before"], "suspend")
    jobs = {1: "a store"}
    assert offloading.around_store_jobs(lambda output: jobs, planner, ("step",), {}) == jobs
    assert (spill.counts.restored, set(spill.counts.away)) == (1, {b"two", b"before"})


def test_loads_of_simple_connector_are_those_that_have_no_event_yet():
    blocks = [SimpleNamespace(block_hash=key) for key in (None, b"one", b"two", b"other")]

    def load(event, *places):
        return SimpleNamespace(
            load_event=event, transfer_meta=SimpleNamespace(cpu_block_ids=list(places))
        )

    scheduler = SimpleNamespace(
        _reqs_to_load={"new": load(None, 1, 3), "before": load(4, 2)},
        cpu_block_pool=SimpleNamespace(blocks=blocks),
        _lazy_mode=False,
    )
    spill = state.attach(scheduler, Spill(Store(10), None))
    spill.counts.stored([b"one", b"two"], "suspend")
    nothing = ([], [], [], None)
    assert simple.around_store_specs(lambda output: nothing, scheduler, ("s",), {}) == nothing
    assert (spill.counts.restored, set(spill.counts.away)) == (1, {b"two"})


@pytest.mark.parametrize(
    ("text", "pages"), [("", 20), ("25%", 5), ("7MiB", 3), ("1GiB", 20), ("33%", 6)]
)
def test_the_first_limit_is_in_whole_pages_and_at_most_the_cache(monkeypatch, text, pages):
    monkeypatch.setenv(FIRST_LIMIT.name, text)
    page = 2 << 20
    manager = SimpleNamespace(mem_size=20 * page, page_size=page, num_layers=1, num_kv_buffers=1)
    assert first_limit_bytes(manager) == pages * page


def test_an_api_server_knows_which_engines_can_be_suspended(monkeypatch):
    here = {"suspend": "applied"}
    assert expected(here, ("OffloadingConnector",), ())
    assert expected(here, ("SimpleCPUOffloadConnector",), ())
    assert not expected({"suspend": "absent"}, ("OffloadingConnector",), ())
    assert not expected({}, ("OffloadingConnector",), ())
    assert not expected(here, (), ())
    assert not expected(here, ("OffloadingConnector", "SimpleCPUOffloadConnector"), ())
    assert not expected(here, ("OffloadingConnector",), [("OffloadingConnector", "fs")])
    monkeypatch.setenv(HOST_POOL.name, "1GiB")
    assert not expected(here, ("OffloadingConnector",), ())
