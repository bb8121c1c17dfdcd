"""Pages that go back piece by piece: for a lower limit and while nobody asks, stored first."""

import itertools
import threading
from types import SimpleNamespace

import pytest
from fakes import raising
from suspend_world import BLOCKS, MOST, PAGE, Shares
from suspend_world import filled as full

from kvpatch import state
from kvpatch.patches.suspend import giving as module
from kvpatch.patches.suspend import hooks, server, simple, watch
from kvpatch.patches.suspend.giving import Stage
from kvpatch.patches.suspend.share import AT_REST, LEAST, LONGEST, STORE, Share
from kvpatch.patches.suspend.spill import cached
from kvpatch.patches.suspend.suspension import Phase
from kvpatch.patches.suspend.watch import Look, Watch
from kvpatch.upstream import kvcached_limits


def filled(worlds, **options):
    """An engine that gives pages back, of which 1 to 6 are full, the coldest first."""
    return full(worlds, gives=True, **options)


@pytest.fixture
def world(worlds):
    return filled(worlds)


def old(begin, end):
    """The keys of its blocks."""
    return {f"old{block}".encode() for block in range(begin, end)}


def lower(world, pages):
    """What kvctl does, and then the next allocation, or the watch."""
    world.manager.limit = world.manager.reported = pages * PAGE
    world.giving.look()


def test_a_lower_limit_stores_what_it_evicts(world):
    lower(world, 4)
    assert len(world.pool.used()) == 24, "evicted before it was stored"
    world.until_idle()
    assert set(world.tier.blocks) == old(4, 16)
    assert world.pool.used() == set(range(16, 28)), "not the coldest pages"
    assert world.manager.total == 4
    assert world.giving.lost == 0
    assert not world.step()
    world.check()


def test_no_more_is_looked_for_than_is_evicted_in_a_step(world, monkeypatch):
    """What is taken up and not evicted is at the head, and looked at again for each page."""
    world.tier.have(*range(4, 28))
    monkeypatch.setattr(module, "TOGETHER", 2 * BLOCKS)
    taken = []
    evict = world.pool.evict_blocks
    monkeypatch.setattr(
        world.pool,
        "evict_blocks",
        lambda some: (taken.append(len(world.giving._taken)), evict(some)),
    )
    lower(world, 1)
    world.until_idle()
    assert world.pool.used() == set()
    assert len(taken) == 3, "not as many together as a step evicts"
    assert set(taken) == {0}, "pages wait that could have been looked for later"


def test_it_is_applied_at_once_where_nothing_has_to_go(world):
    assert world.manager.resize(7 * PAGE)  # as an allocation does
    assert world.manager.total == 7
    assert not world.giving.lowers


def test_what_requests_use_is_left_to_kvcached(world):
    request = world.add("runs", 28, 29)
    request.left = 100
    lower(world, 1)
    for _ in range(40):
        world.step()
    assert world.pool.used() == {28, 29}
    assert world.manager.in_shrink, "the limit was forgotten"
    assert len(world.tier.blocks) == 24
    world.check()


def test_requests_run_while_pages_go_back(world):
    world.tier.steps = 20
    world.add("runs", 28).left = 5
    lower(world, 3)
    for _ in range(5):
        world.step()
    assert world.finished == ["runs"]
    assert world.giving.stage is Stage.STORING
    world.until_idle()
    assert world.manager.total == 3


def test_what_does_not_fit_is_counted(worlds):
    world = filled(worlds, room=8)
    lower(world, 4)
    world.until_idle()
    assert world.giving.lost == 4
    assert world.manager.total == 4


def test_a_block_that_is_used_meanwhile_stays(world):
    lower(world, 4)
    world.step()
    assert world.giving.stage is Stage.STORING
    del world.pool._evictable_blocks[4]  # a request has hit it
    world.until_idle()
    assert 4 in world.pool.used()
    assert world.manager.total == 4, "another page went instead"


def test_each_step_stores_and_evicts_as_much_as_its_share_allows(world):
    world.giving._share = Shares(pages=2, stores=4)
    lower(world, 3)
    planned = evicted = 0
    flying, used = 0, len(world.pool.used())
    while world.step():
        planned = max(planned, len(world.tier.flying) + len(world.tier.blocks) - flying)
        evicted = max(evicted, used - len(world.pool.used()))
        flying, used = len(world.tier.flying) + len(world.tier.blocks), len(world.pool.used())
    assert (planned, evicted) == (4, 4)
    assert world.manager.total == 3
    assert world.giving.given == 4
    assert not any(world.giving._share.ran)


def test_pages_that_are_ready_are_evicted_some_at_a_time(worlds, monkeypatch):
    """Every unmap waits for the workers."""
    monkeypatch.setattr(module, "TOGETHER", 2 * BLOCKS)
    world = filled(worlds)
    world.tier.have(*range(4, 28))
    world.giving._share = Shares(pages=1)
    lower(world, 2)
    used = [len(world.pool.used())]
    while world.step():
        used.append(len(world.pool.used()))
    gone = [before - after for before, after in itertools.pairwise(used) if after < before]
    assert gone == [8, 8, 4], "the last one alone, as there is no other"
    assert world.manager.total == 2


def test_a_tier_keeps_a_block_once_that_a_page_has_twice(world, monkeypatch):
    """SimpleCPUOffloadConnector frees what it is to keep: a block freed twice is two free ones."""
    world.pool._block_id_to_key[5] = b"old4"
    world.tier.blocks[b"old4"] = "bytes of old4"
    kept = []
    monkeypatch.setattr(world.tier, "keep", kept.append)
    lower(world, 6)
    world.until_idle()
    assert [b"old4"] in kept, kept


def test_a_suspension_afterwards_stores_everything_at_once(world):
    world.giving._share = Shares(stores=2)
    lower(world, 6)
    world.until_idle()
    world.suspension.suspend(False, False, None)
    while world.suspension.phase is not Phase.STORING:
        world.step()
    before = len(world.tier.blocks)
    world.step()
    assert len(world.tier.flying) + len(world.tier.blocks) - before == 24 - before
    world.until_idle()
    world.check()


def test_pages_that_the_tier_has_go_while_others_are_stored(world):
    world.tier.steps = 20
    world.tier.have(*range(8, 16))
    lower(world, 4)
    world.step()
    assert world.pool.used() == {*range(4, 8), *range(16, 28)}
    assert world.giving.stage is Stage.STORING
    world.until_idle()
    assert world.manager.total == 4
    assert world.giving.given == 3
    assert list(world.tier.blocks)[-1] == b"old7"
    world.check()


def test_an_idle_engine_gives_everything_back_and_keeps_its_limit(world):
    world.giving.rest()
    world.until_idle()
    assert world.pool.used() == set()
    assert len(world.tier.blocks) == 24
    assert world.manager.get_page_state()["reserved_pages"] == 0
    assert world.manager.total == MOST
    assert not world.step()


def test_an_engine_rests_as_often_as_it_is_idle(worlds, monkeypatch):
    monkeypatch.setattr(module, "MOST_PAGES", 6)  # of one rest
    world = filled(worlds)
    for time in range(4):
        for block in range(4, 28):
            if block not in world.pool.used():
                world.pool.cache(block, f"{time} {block}".encode())
        world.step()
        world.giving.stop()
        world.giving.rest()
        world.until_idle()
        assert world.pool.used() == set(), f"after {time} rests"


def test_an_idle_engine_keeps_what_the_tier_does_not(worlds):
    world = filled(worlds, room=10)
    world.giving.rest()
    world.until_idle()
    assert world.kept() == old(4, 28)
    assert world.giving.lost == 0
    assert len(world.pool.used()) < 24


@pytest.mark.parametrize("steps", range(6))
def test_it_stops_when_a_request_comes(world, steps):
    world.giving.rest()
    for _ in range(steps):
        world.step()
    world.add("comes").left = 50
    before = len(world.pool.used())
    for _ in range(10):
        world.step()
    assert world.giving.stage is Stage.OFF
    assert len(world.pool.used()) == before
    assert old(4, 28) <= world.kept()


def test_a_suspension_goes_before(world):
    lower(world, 4)
    world.step()
    world.suspension.suspend(False, False, None)
    world.until_idle()
    assert world.suspension.said["phase"] == "suspended"
    assert world.suspension.said["lost"] == 0
    world.suspension.resume()
    world.until_idle()
    assert world.manager.limit == 4 * PAGE
    assert world.manager.total == 4


def test_a_limit_that_is_lowered_during_a_suspension_that_is_given_up(world):
    world.suspension.suspend(False, False, None)
    assert world.suspension.phase is not Phase.RUNS
    world.manager.limit = world.manager.reported = 4 * PAGE  # kvctl
    world.suspension.resume()
    assert not world.manager.in_shrink, "it evicts before anything is stored"
    world.until_idle()
    world.giving.look()
    world.until_idle()
    assert world.manager.total == 4
    assert world.giving.lost == 0
    assert old(4, 28) <= world.kept()


def test_a_limit_of_the_command_is_told_until_it_is_applied(world):
    world.suspension.limit(4 * PAGE)
    assert world.suspension.said["lowers"]
    world.until_idle()
    assert not world.suspension.said["lowers"]
    assert world.suspension.said["mapped"] <= (4 + 2) * PAGE


def allocate(world):
    """What an allocation begins with: the limit that kvcached's thread has read last."""
    world.manager.resize(world.manager.reported)


def test_an_allocation_with_the_limit_of_before_does_not_give_the_new_one_up(world):
    """Under load one comes in the tenth of a second before kvcached's thread has read it."""
    world.lag = 0
    world.suspension.limit(4 * PAGE)
    allocate(world)
    assert world.manager.reported == MOST * PAGE
    assert world.giving.lowers, "called done"
    for _ in range(10):
        world.step()
        allocate(world)
    assert len(world.pool.used()) == 12
    world.manager.reported = world.manager.limit
    world.until_idle()
    assert world.manager.total == 4


@pytest.mark.parametrize("by", ["an old report", "kvpatch limit", "kvctl"])
def test_a_limit_that_was_raised_again_leaves_an_idle_engine_what_it_has(world, by):
    """Of kvctl no allocation comes that would bring the second limit."""
    if by == "an old report":
        world.manager.reported = 3 * PAGE
        allocate(world)
    elif by == "kvpatch limit":
        world.suspension.limit(4 * PAGE)
        world.suspension.limit(MOST * PAGE)
    else:
        lower(world, 2)
        assert world.giving.lowers
        lower(world, MOST)
    assert not world.giving.lowers
    world.until_idle()
    assert len(world.pool.used()) == 24
    assert world.manager.total == MOST


def test_no_page_is_mapped_while_a_lower_limit_is_stored_for(world):
    world.tier.steps = 50
    lower(world, 4)
    assert world.giving.stage is Stage.STORING
    assert not world.manager.in_shrink, "its allocations evict what is not being stored yet"
    world.step()
    assert world.giving.stage is Stage.STORING
    assert world.manager.in_shrink, "its allocations map pages"
    assert world.manager.target_num_blocks == 4 * BLOCKS
    lower(world, MOST)
    assert not world.manager.in_shrink
    lower(world, 4)
    world.until_idle()
    assert (world.manager.in_shrink, world.manager.total) == (False, 4)


class Requests:
    """What running requests take: free blocks, or those of the coldest cached ones."""

    def __init__(self, world, blocks):
        world.add("runs").left = 1000
        self.world, self.blocks = world, blocks
        self.mapped = 0
        self.lost = []

    def take(self):
        """Allocate, at the beginning of a step."""
        world = self.world
        allocate(world)
        if not world.manager.in_shrink:
            self.mapped += self.blocks
            return
        coldest = list(world.pool._evictable_blocks)[: self.blocks]
        there = set(world.tier.blocks) | {key for _, key, _ in world.tier.flying}
        keys = [world.pool._block_id_to_key[block] for block in coldest]
        self.lost += [key for key in keys if key not in there]
        world.pool.evict_blocks(set(coldest))


@pytest.mark.parametrize("by", ["kvctl", "kvpatch limit"])
@pytest.mark.parametrize("pages", [1, 2, 64])
def test_what_requests_take_while_a_limit_waits_is_stored_before(worlds, pages, by, monkeypatch):
    monkeypatch.setattr(module, "AHEAD", 6)
    world = filled(worlds)
    world.giving._share = Shares(pages, stores=8)
    world.tier.steps = 3
    requests = Requests(world, 3)
    for _ in range(3):
        world.step()
    if by == "kvctl":
        world.manager.limit = world.manager.reported = 2 * PAGE
    else:
        world.suspension.limit(2 * PAGE)
        world.manager.reported = world.manager.limit
    while world.pool._evictable_blocks:
        requests.take()
        world.step()
    assert requests.lost == []
    assert requests.mapped <= 2 * requests.blocks, "it grows above the limit"
    world.check()


def test_a_full_tier_does_not_let_an_engine_grow_above_its_limit(world):
    world._plan = lambda: world.spill.no_room(False)
    requests = Requests(world, 1)
    world.step()
    lower(world, 2)
    for _ in range(5):
        requests.take()
        world.step()
    assert world.giving.stage is Stage.STORING
    assert world.manager.in_shrink
    assert requests.mapped <= 2


def test_a_piece_does_not_wait_for_what_is_stored_ahead_of_it(world):
    """Under load there is always more."""
    old = cached(world.pool)
    world.spill.begin(old[:2])
    while not world.spill.settled([one.key for one in old[:2]]):
        world.steps += 1
        world._plan()
        world.tier.step(world.steps)
    world.spill.add(old[2:4])
    assert world.spill.settled([one.key for one in old[:2]])
    assert not world.spill.done
    assert not world.spill.settled([old[2].key])


def test_a_step_asks_the_tier_for_one_of_the_blocks_on_their_way(world, monkeypatch):
    old = cached(world.pool)
    asked = []
    awaits = world.tier.awaits
    monkeypatch.setattr(world.tier, "awaits", lambda keys: asked.append(len(keys)) or awaits(keys))
    world.spill.begin(old)
    world._plan()
    keys = [one.key for one in old]
    for _ in range(5):
        assert not world.spill.done
        assert not world.spill.settled(keys)
    assert asked == [1] * 10
    # The copies end in any order.
    world.tier.flying.sort(key=lambda one: one[1] == keys[-1])
    while len(world.tier.flying) > 1:
        _, key, content = world.tier.flying.pop(0)
        world.tier.blocks[key] = content
        assert not world.spill.done
        assert not world.spill.settled(keys)
        assert world.spill.settled([key])
    world.tier.flying.clear()
    assert world.spill.settled(keys)
    assert world.spill.done


def test_the_blocks_of_simple_stores_are_looked_through_once(monkeypatch):
    looks = []
    under_way = simple.under_way
    monkeypatch.setattr(simple, "under_way", lambda of: looks.append(of) or under_way(of))
    blocks = [SimpleNamespace(block_hash=name) for name in (b"a", b"b", b"c")]
    events = {1: SimpleNamespace(gpu_block_ids=[0]), 2: SimpleNamespace(gpu_block_ids=[1])}
    pool = SimpleNamespace(blocks=blocks)
    tier = simple.SimpleTier(SimpleNamespace(_store_event_to_blocks=events, _gpu_block_pool=pool))
    for _ in range(5):
        assert tier.awaits({b"a", b"c"}) == {b"a"}
    assert len(looks) == 1
    del events[1]
    events[3] = SimpleNamespace(gpu_block_ids=[2])
    assert tier.awaits({b"a", b"b", b"c"}) == {b"b", b"c"}
    events.clear()
    assert tier.awaits({b"b"}) == set()
    assert len(looks) == 3


def test_what_is_stored_ahead_takes_no_room_of_the_piece_and_is_tried_once(worlds):
    world = filled(worlds, room=5)
    old = cached(world.pool)
    world.spill.begin(old[:3])
    world.spill.add(old[3:])
    assert [one.key for one in world.spill.next()] == [one.key for one in old[:5]]
    world.spill.no_room(forever=True)
    world.spill.add(old[3:])
    assert world.spill.next() == []


def test_what_is_stored_ahead_is_taken_up_in_pieces_and_not_in_a_step_that_evicts(
    worlds, monkeypatch
):
    monkeypatch.setattr(module, "AHEAD_IN_A_STEP", 2)
    world = filled(worlds)
    world.giving._share = Shares(pages=1, stores=100)
    world.add("runs", 28).left = 1000
    did = []
    evict, add = world.pool.evict_blocks, world.spill.add

    def adding(blocks):
        blocks = list(blocks)
        did.append(len(blocks))
        add(blocks)

    monkeypatch.setattr(world.spill, "add", adding)
    monkeypatch.setattr(world.pool, "evict_blocks", lambda ids: did.append("evicts") or evict(ids))
    steps = []
    lower(world, 3)
    for _ in range(40):
        did.clear()
        world.step()
        steps.append(tuple(did))
    assert {(2,), ("evicts",)} <= set(steps) <= {(), (0,), (1,), (2,), ("evicts",)}


def test_a_lower_limit_is_told_when_it_has_given_something_back(world):
    """What tells it reads /dev/shm: not in every step of an engine that serves requests."""
    world.giving._share = Shares(pages=1, stores=100)
    world.add("runs", 28).left = 1000
    world.suspension.limit(3 * PAGE)
    world.manager.reported = world.manager.limit
    told, given = [], []
    for _ in range(40):
        world.step()
        if not told or told[-1] is not world.suspension.said:
            told.append(world.suspension.said)
            given.append(world.giving.given)
    assert [said["lowers"] for said in told[1:]] == [True] * (len(told) - 2) + [False]
    assert len(set(given[:-1])) == len(given) - 1, "told again without anything new"


def test_a_limit_by_revision_is_refused(worlds):
    """An allocation would undo it; an engine without a tier has kvcached's own."""
    manager = filled(worlds).manager
    calls = []

    def wrapped(*args, **kwargs):
        calls.append((args, kwargs))

    with pytest.raises(ValueError, match=r"refuses .* by revision .*; use kvpatch\.control"):
        module.around_memory_limit(wrapped, manager, (4 * PAGE,), {"revision": 1})
    assert calls == []
    module.around_memory_limit(wrapped, SimpleNamespace(), (4 * PAGE,), {"revision": 1})
    assert calls == [((4 * PAGE,), {"revision": 1})]


def test_pages_of_requests_that_wait_for_the_fence_are_not_waited_for(world):
    """Under load there are always some; they are counted as given, too."""
    others = (0, [7])
    world.manager._retired_pages.append(others)
    world.add("runs").left = 1000
    lower(world, 4)
    for _ in range(30):
        world.step()
    assert len(world.pool.used()) == 12
    assert world.manager.in_shrink, "the limit was not left to kvcached"
    assert world.giving.lowers, "called done with a page too many"
    world.manager._retired_pages.remove(others)
    allocate(world)
    assert world.manager.total == 4
    assert not world.giving.lowers


@pytest.mark.parametrize("where", ["begin", "trim", "apply"])
def test_an_error_while_it_ends_does_not_end_the_engine(world, where, monkeypatch):
    fail = raising(RuntimeError("of a test"))
    if where != "trim":
        monkeypatch.setattr(type(world.manager), "_resize", fail)
    if where == "begin":
        monkeypatch.setattr(world.spill, "begin", fail)
    if where == "trim":
        monkeypatch.setattr(type(world.manager), "trim", fail)
        world.giving.rest()
    else:
        lower(world, 4)
    world.until_idle()
    assert not world.step()


def test_a_limit_that_an_error_left_to_kvcached_is_not_taken_up_again(world, monkeypatch):
    """Each allocation comes with it, and each would write the same error into the log."""
    begun = []

    def fail(blocks, reason):
        begun.append(1)
        raise ValueError("of a test")

    monkeypatch.setattr(world.spill, "begin", fail)
    lower(world, 4)
    world.until_idle()
    assert world.manager.in_shrink
    assert not world.giving.lowers
    for _ in range(10):
        world.step()
        allocate(world)
    assert begun == [1]
    lower(world, 3)
    world.until_idle()
    assert begun == [1, 1]


class Watched:
    """A watch without its thread."""

    def __init__(self, world, monkeypatch, idle):
        self.now = 100.0
        self.sent = []
        monkeypatch.setattr(watch, "EVERY", 10_000)
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(server, "hand_over", lambda engine, look: self.sent.append(look))
        self.world = world
        self.watch = Watch(world, world.giving, idle)
        self.watch.close()

    def look(self, seconds=0.0):
        self.now += seconds
        self.watch.look(self.world, self.world.giving)
        return len(self.sent)

    def take(self):
        """Let the engine take the last one."""
        self.sent[-1].take(self.world.giving)
        self.world.until_idle()


def test_an_idle_engine_sees_a_limit_that_is_set_in_shm(world, monkeypatch):
    watched = Watched(world, monkeypatch, None)
    assert watched.look(1000) == 0
    world.manager.limit = world.manager.reported = 4 * PAGE
    assert watched.look() == 1
    assert watched.look() == 1, "a second look before the first was taken"
    watched.take()
    assert world.manager.total == 4
    assert watched.look() == 1


def test_the_time_without_requests_begins_when_the_last_one_has_ended(world, monkeypatch):
    watched = Watched(world, monkeypatch, 30)
    world.add("runs", 28)
    assert watched.look(100) == 0
    world.until_idle()
    assert watched.look(29) == 0
    assert watched.look(2) == 1
    watched.take()
    assert world.pool.used() == set()
    assert watched.look(100) == 1, "it rests once"
    world.add("again", 28)
    assert watched.look() == 1
    world.until_idle()
    assert watched.look(31) == 2


def test_a_request_between_two_looks_is_not_missed(world, monkeypatch):
    state.attach(world, world.giving)
    watched = Watched(world, monkeypatch, 30)
    watched.look(20)
    hooks.after_engine_step(lambda: True, world, (), {})  # no look sees it wait or run
    assert watched.look(20) == 0
    assert watched.look(20) == 1
    watched.take()
    assert watched.look(100) == 1
    hooks.after_engine_step(lambda: True, world, (), {})
    world.pool.cache(28, b"short28")
    assert watched.look(100) == 2
    watched.take()
    assert world.pool.used() == set()


def test_it_rests_after_a_suspension_that_was_given_up(world, monkeypatch):
    watched = Watched(world, monkeypatch, 30)
    assert watched.look(31) == 1
    watched.sent[0].take(world.giving)
    world.suspension.suspend(False, False, None)
    world.step()
    assert watched.look() == 1
    world.suspension.resume()
    world.until_idle()
    assert world.pool.used()
    assert watched.look() == 2
    watched.take()
    assert world.pool.used() == set()


def test_a_look_of_an_engine_that_cannot_is_kept_to_itself():
    look = Look(rests=True)
    look.take(SimpleNamespace())
    assert look.taken.is_set()


def test_a_free_on_another_thread_never_meets_a_limit_without_a_goal():
    """kvcached asserts that there is one, which would end the engine."""
    told = []

    class Manager:
        block_mem_size = PAGE // BLOCKS
        _lock = threading.RLock()

        def __setattr__(self, name, value):
            other = []
            free = threading.Thread(target=lambda: other.append(self._lock.acquire(blocking=False)))
            free.start()
            free.join()
            told.append((name, not other[0]))

    kvcached_limits.map_no_more(Manager(), 2 * PAGE)
    assert told == [("target_num_blocks", True), ("in_shrink", True)]


class Clock:
    """In the place of ``time.perf_counter``."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def pages(self, share, runs, step, page):
        """One turn, after a step of so many seconds; return how many pages there was time for."""
        self.now += step
        share.begin(runs)
        pages = 0
        while share.left:
            pages += 1
            self.now += page
        share.end()
        return pages


@pytest.mark.parametrize(
    ("step", "runs", "stores", "pages"),
    [
        (0.001, True, 8, 3),  # a share is half of what the step and the share before took
        (0.02, True, 31, 10),  # 2 ms, half for stores
        (0.06, True, 46, 15),  # a tenth of half of a long step
        (1.0, True, 78, 25),
        (0.0, False, 78, 50),
    ],
)
def test_a_share_is_at_most_as_long_as_its_step(step, runs, stores, pages, monkeypatch):
    clock = Clock(monkeypatch)
    share = Share()
    assert clock.pages(share, runs, step, 0.0001) == pages
    assert share.stores == stores


def test_a_page_that_takes_longer_than_its_share_is_paid_for_later(monkeypatch):
    clock = Clock(monkeypatch)
    share = Share()
    taken = [clock.pages(share, True, 0.0004, 0.0004) for _ in range(40)]
    assert set(taken) == {0, 1}
    assert taken[:5] == [1, 0, 0, 0, 1]
    assert share.stores == LEAST
    assert clock.pages(share, False, 0.0, 0.0004) == 13, "what was owed is not paid at rest"
    assert (AT_REST, LONGEST, STORE, LEAST) == (0.005, 0.002, 32e-6, 8)


@pytest.mark.parametrize("begins", [True, False], ids=["unused", "no share"])
def test_a_share_that_is_not_used_is_not_kept_and_steps_without_one_are_no_debt(
    monkeypatch, begins
):
    clock, share = Clock(monkeypatch), Share()
    assert share.stores == LEAST
    if not begins:
        clock.pages(share, True, 0.02, 0.0001)
    for _ in range(5 if begins else 100):
        clock.now += 0.02
        if begins:
            share.begin(True)
        share.end()
    assert clock.pages(share, True, 0.02, 0.0001) == 10


@pytest.mark.parametrize("first", ["limit", "idle"])
def test_a_limit_goes_on_with_what_was_taken_up_before_it(world, first):
    world.giving._share = Shares(pages=1000, stores=6)
    if first == "limit":
        lower(world, 5)
    else:
        world.giving.rest()
    world.step()
    assert world.giving.stage is Stage.STORING
    lower(world, 3)
    world.until_idle()
    assert world.giving.lost == 0
    assert old(4, 20) <= set(world.tier.blocks)
    assert world.manager.total == 3


def test_a_limit_may_come_from_another_thread_between_two_pages(world, monkeypatch, caplog):
    more = world.spill.more

    def meanwhile(blocks):
        more(blocks)
        monkeypatch.setattr(world.spill, "more", more)
        other = threading.Thread(target=world.manager.resize, args=(3 * PAGE,))
        other.start()
        other.join()

    monkeypatch.setattr(world.spill, "more", meanwhile)
    lower(world, 5)
    world.until_idle()
    assert "could not be given back" not in caplog.text
    assert world.giving.lost == 0


def test_a_limit_that_was_raised_meanwhile_begins_at_the_coldest_pages(world):
    world.fence = 50
    world.giving._share = Shares(pages=1000, stores=4)
    world.add("runs", 28).left = 1000
    lower(world, 3)
    while not (world.giving._going and world.giving._storing):
        world.step()
    lower(world, 8)
    world.step()
    lower(world, 3)
    for _ in range(60):
        world.step()
    assert {block // 4 for block in world.pool.used()} == {6, 7}, "not the coldest pages went"
    assert (world.manager.total, world.giving.lost) == (3, 0)


def test_time_in_which_the_process_was_stopped_is_not_owed(worlds, monkeypatch):
    world, now = filled(worlds), [100.0]
    monkeypatch.setattr("kvpatch.patches.suspend.share.time.perf_counter", lambda: now[0])
    world.giving._share = Share()
    more = world.spill.more

    def stopped(blocks):
        monkeypatch.setattr(world.spill, "more", more)
        now[0] += 600
        more(blocks)

    monkeypatch.setattr(world.spill, "more", stopped)
    world.add("runs", 28).left = 1000
    lower(world, 3)
    for _ in range(300):
        now[0] += 0.02
        world.step()
    assert now[0] > 700, "it was not stopped"
    assert world.manager.total == 3
