"""The keeper: when extents are committed, and when and by whom they are given back."""

import itertools
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from fakes import raising
from pool_world import MIB, counted, memory_in

from kvpatch.pool import keeper as keeping
from kvpatch.pool import ledger, member, record
from kvpatch.pool.extents import Extent, Extents
from kvpatch.pool.keeper import Keeper
from kvpatch.pool.ranks import Failed
from kvpatch.pool.record import Owner

CHUNK = MIB // 4  # of which an extent has four
PER = 4


class Ranks:
    """Workers that do what they are asked to, unless they shall not."""

    def __init__(self):
        self.registered = {}
        self.failing = set()

    def register(self, offset, size):
        if "register" in self.failing:
            raise Failed("it does not register")
        self.registered[offset] = size

    def deregister(self, offset, size):
        if "deregister" in self.failing:
            raise Failed("it does not deregister")
        self.registered.pop(offset, None)

    def close(self):
        self.registered.clear()


class Engine:
    """An engine with a tier: what its scheduler and its workers do is up to the test."""

    def __init__(self, world, name, tier, floor=0):
        self.world = world
        self.memory = memory_in(world.folder.parent, tier)
        owner = Owner(0, 0, tier, floor, MIB, 0.0, world.now, ledger.pid_namespace(), name)
        self.member = member.join(ledger.record_of(world.folder, name), world.size, owner)
        self.ranks = Ranks()
        self.extents = Extents(tier // CHUNK, CHUNK, MIB, world.clock)
        self.pinned = set()
        self.keys = itertools.count()
        self.keeper = Keeper(
            self.extents,
            self.memory,
            self.member,
            self.ranks,
            threading.RLock(),
            self.evict,
            world.clock,
        )

    def evict(self, index):
        gone = [chunk for chunk in self.extents.open[index].held if chunk not in self.pinned]
        for chunk in gone:
            self.extents.release(chunk)
        return len(gone)

    def turn(self, times=1):
        for _ in range(times):
            self.keeper.turn()
            self.check()

    def check(self):
        """What is registered is committed, what is committed is counted, and no more."""
        assert self.memory.committed == self.member.committed == len(self.extents.open) * MIB
        assert set(self.ranks.registered) == {index * MIB for index in self.extents.open}

    def wants(self, count):
        self.keeper.need(count)
        self.turn()

    def store(self, count=PER, then=0):
        """Store blocks, growing as long as the pool has room; ``then`` seconds pass."""
        stored = []
        while not stored:
            waits = self.keeper.need(count)
            if count <= self.extents.free:
                stored = self.extents.allocate([next(self.keys) for _ in range(count)])
            elif not waits:
                break
            else:
                self.turn()
        self.world.now += then
        return stored


def turn(*engines):
    for engine in engines:
        engine.turn()


def mib(*engines):
    """The MiB that engines have committed."""
    return tuple(engine.memory.committed / MIB for engine in engines)


class World:
    """Engines that share one folder and one clock, which a test sets."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.size = 8 * MIB
        self.now = 1000.0
        self.engines = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def clock(self):
        return self.now

    def engine(self, name="one", tier=64 * MIB, floor=0):
        made = Engine(self, name, tier, floor)
        self.engines.append(made)
        return made

    def after(self, seconds, *engines):
        """Let time pass, and engines have a turn each, in that order."""
        self.now += seconds
        turn(*engines)

    def limit(self, size):
        assert ledger.set_limit(self.folder, size)


@pytest.fixture
def world(monkeypatch):
    folder = Path("/dev/shm") / f"kvpatch-test-pool-{os.getpid()}-{os.urandom(4).hex()}"
    made = World(folder, monkeypatch)
    yield made
    for engine in made.engines:
        engine.ranks.failing.clear()
        engine.keeper.close()
    assert counted(folder) == 0
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()


def engine(name):
    return pytest.fixture(lambda world: world.engine(name), name=name)


one, two, three = map(engine, ("one", "two", "three"))


def test_extents_are_committed_as_blocks_need_them(world, one):
    for stored in range(1, 6):
        world.now += 1
        assert len(one.store()) == PER
        one.turn(2)
        assert one.memory.committed <= stored * MIB + MIB
    assert one.extents.used == 5 * PER


def test_as_much_is_kept_free_as_was_stored_at_once_lately(world, one):
    one.store(3 * PER)
    one.turn()
    assert one.extents.free == 3 * PER
    world.after(keeping.RECENT, one)
    assert one.extents.free == 3 * PER
    world.after(1, one)
    assert one.extents.free == PER  # one extent
    one.store(1)
    assert one.keeper.extents.free == PER - 1
    one.turn()
    assert one.memory.committed == 4 * MIB
    one.store(PER - 1)
    one.keeper.reset()
    one.turn()
    assert one.memory.committed == MIB


def test_what_was_stored_in_one_moment_counts_together(one):
    one.store(2 * PER)
    one.turn()
    one.store(PER)  # in the same moment
    one.turn()
    assert one.extents.free == 3 * PER


def test_a_store_waits_while_the_tier_can_grow_and_is_then_the_policys(world, one):
    assert one.keeper.need(6 * PER)
    one.turn()
    assert one.extents.free >= 6 * PER
    world.now += 10
    assert one.keeper.need(100 * PER)
    one.turn()
    assert one.memory.committed == 8 * MIB
    assert not one.keeper.need(100 * PER)  # nothing is left


def test_a_full_pool_is_not_looked_at_for_every_store(one):
    one.store(8 * PER)
    one.turn()
    one.keeper._wake.clear()
    assert not one.keeper.need(PER)
    assert not one.keeper._wake.is_set()


def test_an_engine_that_wants_nothing_leaves_the_ledger_to_the_others(world, one, two, monkeypatch):
    turn(one, one, two, two)

    def rests():
        with monkeypatch.context() as patched:
            patched.setattr(ledger, "alone", None)  # it is told without the lock
            return one.keeper.rests

    assert rests()
    world.now += keeping.AT_REST
    assert not rests()
    one.turn()
    assert rests()
    assert one.keeper.need(2 * PER)
    assert not rests()
    one.store(2 * PER)
    one.turn(2)
    assert rests()
    peer = next(peer for peer in two.member.look(0, 0.0).peers if peer.owner.name == "one")
    two.member.ask(peer, MIB)
    assert not rests()
    one.turn()
    world.after(keeping.TO_GIVE, one, one)
    assert rests()
    world.limit(MIB)
    assert not rests()
    one.pinned.update(range(64 * PER))
    one.turn()
    assert one.extents.draining()
    one.keeper._room = False  # and does not grow
    assert not rests()  # until what has to go is gone
    one.pinned.clear()
    one.turn()
    world.after(keeping.TO_GIVE, one)
    assert rests()
    (world.folder / ledger.LIMIT).unlink()
    assert not rests()
    one.turn()
    one.member.path.unlink()
    assert not rests()
    one.member.path.touch()


def test_an_engine_that_asks_another_does_not_rest(world, one, two):
    one.store(8 * PER)
    world.after(10, one)
    two.wants(PER)
    assert two.keeper._asked
    world.now += keeping.PATIENCE
    two.keeper._looked_at = world.now
    assert not two.keeper.rests


def test_room_that_was_not_looked_for_lately_is_looked_for_before_blocks_are_evicted(
    world, one, two
):
    two.store(8 * PER)
    one.turn()
    assert not one.keeper.need(PER)
    two.keeper.reset()
    two.turn()
    assert not one.keeper.need(PER)
    world.now += keeping.AT_REST
    one.keeper._wake.clear()
    assert one.keeper.need(PER)
    assert one.keeper._wake.is_set()
    one.turn()
    assert one.extents.free >= PER


def test_a_store_does_not_wait_for_ever(world, one):
    assert one.keeper.need(PER)  # nobody turns
    world.now += keeping.PATIENCE / 2
    assert one.keeper.need(PER)
    world.now += keeping.PATIENCE / 2
    assert not one.keeper.need(PER)


def test_a_small_store_does_not_hide_a_large_one_that_waits(one):
    one.turn()
    assert one.keeper.need(6 * PER)
    assert not one.keeper.need(1)  # it has room
    one.turn()
    assert one.extents.free >= 6 * PER
    assert not one.keeper.need(6 * PER)
    assert len(one.extents.allocate(range(6 * PER))) == 6 * PER


def test_patience_counts_from_when_memory_came_last(world, one):
    for _ in range(4):
        assert one.keeper.need(PER * (1 + len(one.extents.open)))
        world.after(keeping.PATIENCE * 0.75, one)


def test_an_engine_has_no_more_than_its_tier(world):
    one = world.engine(tier=2 * MIB)
    assert len(one.store(2 * PER)) == 2 * PER
    assert not one.keeper.need(1)
    one.turn(3)
    assert one.memory.committed == 2 * MIB


def test_what_a_transfer_names_is_not_given_back(one):
    one.extents.begin(1, one.store(4 * PER)[:1], workers=1)
    one.keeper.reset()
    one.turn(3)
    assert 0 in one.extents.open
    assert one.memory.committed <= 2 * MIB
    one.extents.report(1, 1)
    one.turn(3)
    assert one.memory.committed == MIB


def test_a_lower_limit_is_shared_out_at_once(world, one, two):
    one.store(6 * PER)
    two.store(2 * PER, then=5)
    one.extents.use(range(PER))  # the first extent is hot
    turn(one, two)
    world.limit(4 * MIB)
    turn(one, two)
    assert mib(one, two) == (3, 1)
    assert 0 in one.extents.open
    one.turn(5)
    two.turn(5)
    assert counted(world.folder) == 4 * MIB
    world.limit(1)
    world.after(5, one, two, one, two)
    assert counted(world.folder) == 0


def full(world, count):
    """An engine alone in a pool of so many extents, all of which hold blocks."""
    world.size = count * MIB
    one = world.engine(tier=count * MIB)
    one.store(count * PER)
    one.turn()
    one.keeper._wake.clear()
    return one


class Looked(dict[int, Extent]):
    """Counts the extents that are looked at."""

    looks = 0

    def __getitem__(self, index):
        self.looks += 1
        return super().__getitem__(index)

    def get(self, index, default=None):
        self.looks += 1
        return super().get(index, default)

    def items(self):
        self.looks += len(self)
        return super().items()

    def values(self):
        self.looks += len(self)
        return super().values()


def test_a_turn_looks_at_few_extents_however_many_there_are(world):
    one = full(world, 60)
    one.extents.open = looked = Looked(one.extents.open)
    one.turn()
    looked.looks = 0
    one.keeper.turn()
    assert looked.looks <= 5
    world.now += 10
    one.extents.use(range(10 * PER))
    looked.looks = 0
    one.keeper.turn()
    assert looked.looks <= 5 + 2 * 10  # and at those that were used since


def test_a_much_lower_limit_has_few_extents_go_at_a_time(world, monkeypatch):
    """What has to go is evicted by the next step of the scheduler, if it comes first."""
    one = full(world, 60)
    going = []
    evict = one.evict
    monkeypatch.setattr(
        one.keeper, "_evict", lambda index: going.append(one.extents.going) or evict(index)
    )
    world.limit(1)
    turns = 0
    while one.memory.committed:
        one.turn()
        turns += 1
        assert one.keeper._wake.is_set() == bool(one.memory.committed)  # it goes on at once
        one.keeper._wake.clear()
    assert len(going) == 60
    assert max(going) == keeping.PER_TURN * MIB
    assert turns == -(-60 // keeping.PER_TURN)


def test_extents_that_cannot_go_yet_hold_no_others_up(world):
    one = full(world, 60)
    one.pinned.update(range(0, 60 * PER, PER))  # a block of each
    world.limit(1)
    one.turn()
    assert len(one.extents.draining()) == keeping.PER_TURN
    assert not one.keeper._wake.is_set()
    one.turn()
    assert len(one.extents.draining()) == 2 * keeping.PER_TURN
    one.pinned.clear()
    while one.memory.committed:
        one.turn()


def test_what_another_engine_asks_for_goes_at_once(world):
    one = full(world, 60)
    two = world.engine("two")
    two.member.ask(next(iter(two.member.look(0, 0.0).peers)), 20 * MIB)
    one.turn()
    assert one.keeper.evicted == 20 * PER  # once it has answered nothing reminds it


def test_blocks_in_transfers_go_when_they_end(world, one):
    one.pinned.update(one.store(2 * PER)[:2])
    world.limit(1)
    one.turn()
    assert one.memory.committed == MIB
    assert one.extents.draining() == [0]
    assert one.extents.free == 0
    one.pinned.clear()
    one.turn()
    assert one.memory.committed == 0
    assert one.keeper.evicted == 2 * PER


def test_the_coldest_extent_of_the_machine_goes(world, one, two, three):
    one.store(4 * PER, then=10)
    two.store(4 * PER)
    world.after(10, one, two, three)
    assert counted(world.folder) == 8 * MIB
    assert not three.keeper.need(PER)  # the policy evicts meanwhile
    three.turn()  # asks
    two.turn()
    assert two.memory.committed == 4 * MIB
    one.turn()  # gives
    assert one.memory.committed == 3 * MIB
    three.turn()
    assert three.memory.committed == MIB
    assert len(three.extents.allocate(range(PER))) == PER


@pytest.mark.parametrize(
    ("floor", "committed"), [(3 * MIB, 3), (3 * MIB + MIB // 2, 4)], ids=["whole", "in part"]
)
def test_an_engine_keeps_its_floor_however_cold_it_is(world, floor, committed):
    one, two = world.engine("one", floor=floor), world.engine("two")
    one.store(4 * PER, then=60)
    two.store(4 * PER, then=10)
    for _ in range(20):  # what it asks for is more than may be given
        two.wants(4 * PER)
        one.turn()
        world.now += 0.2
    assert mib(one, two) == (committed, 8 - committed)


def test_a_suspended_engine_keeps_all_that_it_has(world, one, two):
    one.store(4 * PER, then=60)
    two.store(4 * PER, then=10)

    def ask():
        for _ in range(80):  # who gives nothing is not asked for a while
            two.wants(4 * PER)
            one.turn()
            world.now += 0.2
        return one.extents.used

    one.member.keep(everything=True)
    assert ask() == 4 * PER
    one.member.keep(everything=False)
    assert ask() < 4 * PER


def test_below_its_floor_an_engine_takes_what_is_warmer_than_its_own(world):
    one, two = world.engine("one", floor=3 * MIB), world.engine("two")
    one.store(PER, then=10)
    two.store(7 * PER)
    for _ in range(20):
        one.wants(4 * PER)
        two.turn()
        world.now += 0.2
    assert mib(one, two) == (3, 5)  # and no more: its own are the coldest


def test_floors_are_kept_while_a_lower_limit_has_room_for_them(world):
    one, two = world.engine("one", floor=3 * MIB), world.engine("two")
    one.store(4 * PER)
    two.store(4 * PER, then=5)
    for limit, have in ((5, (3, 2)), (2, (1, 1))):
        turn(one, two)
        world.limit(limit * MIB)
        for engine in (one, two) * 4:
            engine.turn()
        assert (one.memory.committed // MIB, two.memory.committed // MIB) == have


@pytest.mark.parametrize("stores", [False, True])
def test_who_gave_an_extent_does_not_take_it_back(world, one, two, stores):
    """Else a busy engine takes it before the one that asked has looked, again and again."""
    one.store(8 * PER)
    world.after(10, two, one)
    two.wants(PER)
    if stores:
        one.wants(PER)
    one.turn(2 if stores else 3)
    assert one.memory.committed == 7 * MIB
    two.turn()
    assert two.memory.committed == MIB


def test_who_gave_in_time_and_has_more_later_is_not_passed_over(world, one, two):
    one.store(8 * PER)
    world.after(10, two, one)
    two.wants(PER)
    one.turn()
    world.now += 5  # nothing is wanted any more
    two.turn(2)
    assert mib(one, two) == (7, 1)
    one.wants(PER)
    turn(two, one)
    assert mib(one, two) == (8, 0)
    world.after(5, one)
    two.wants(PER)
    turn(one, two)
    assert two.memory.committed == MIB


def test_if_the_own_coldest_is_the_coldest_of_all_nobody_is_asked(one, two):
    two.store(4 * PER, then=10)
    one.store(4 * PER)
    turn(one, two)
    assert not two.keeper.need(PER)
    two.turn()
    assert one.member.look(0, 1.0).asked == 0


def test_what_is_seen_to_be_full_is_not_tried(one, two, monkeypatch):
    one.store(8 * PER)
    one.turn()
    monkeypatch.setattr(two.member, "take", lambda size: pytest.fail("it takes the lock"))
    two.wants(PER)


def test_an_own_extent_that_holds_nothing_does_not_hide_that_others_are_older(world, one, two):
    kept = two.store(PER)
    two.turn()
    world.now += 100
    one.store(6 * PER, then=100)
    two.extents.use(kept)
    turn(one, two)
    assert two.extents.last_use() < 1  # it has an extent ahead
    world.after(10, one)
    two.wants(3 * PER)
    assert one.member.look(0, 1.0).asked > 0


def test_an_extent_kept_ahead_does_not_make_an_engine_the_oldest(world, one, two, three):
    one.store(3 * PER, then=60)
    two.store(3 * PER)
    two.turn()  # one ahead
    assert two.extents.last_use() < 1 <= two.extents.last_use_of_held()
    world.after(60, one, two)
    three.wants(2 * PER)
    three.turn()
    assert set(three.keeper._asked) == {one.member.path.name}


def asked_by(engine, *others):
    """Whom an engine asks that needs an extent, when the others have looked."""
    for other in others:
        other.turn()
    engine.wants(PER)
    return set(engine.keeper._asked)


def test_who_finds_less_of_what_it_stores_gives_first(world, one, two, three):
    one.store(4 * PER)
    one.extents.reuse.found(8 * PER)
    world.now += 10
    two.store(4 * PER, then=10)
    assert asked_by(three, one, two) == {two.member.path.name}


def test_an_equal_part_is_taken_from_who_has_more_before_who_has_less(one, two, three):
    one.store(2 * PER, then=10)
    two.store(6 * PER, then=10)
    assert asked_by(three, one, two) == {two.member.path.name}


def test_an_engine_that_does_not_answer_is_passed_over(world):
    silent, slow, one = world.engine("silent"), world.engine("slow"), world.engine("one")
    silent.store(4 * PER)
    world.now += 10  # it does not look any more
    slow.store(3 * PER, then=10)
    one.store(PER)
    slow.turn()
    assert counted(world.folder) == 8 * MIB
    one.wants(PER)
    asked = {
        name: engine.member.look(0, engine.extents.last_use()).asked
        for name, engine in (("silent", silent), ("slow", slow))
    }
    assert asked == {"silent": 0, "slow": MIB}
    # It looks, as above, and gives nothing: now the other one is asked, which looks again.
    for _ in range(3):
        world.now += keeping.TO_GIVE
        for engine in (silent, slow):
            engine.member.look(0, engine.extents.last_use())
        one.wants(PER)
    assert silent.member.look(0, 1.0).asked == MIB
    turn(silent, one)
    assert one.memory.committed == 2 * MIB


def test_an_engine_that_did_not_give_is_not_asked_again_for_a_while(world, one, two, three):
    for engine in (one, two):
        engine.store(4 * PER)
        engine.pinned.update(range(4 * PER))  # it answers, and cannot give
        world.now += 10
    wanted = []
    begun = world.now
    while world.now - begun < keeping.PASSED_OVER:
        three.keeper.need(PER)
        turn(one, two, three)
        wanted.append(set(three.keeper._asked))
        world.now += 0.3
    first, second = ({engine.member.path.name} for engine in (one, two))
    assert wanted[0] == first
    assert wanted.count(first) * 0.3 <= keeping.TO_GIVE + 0.6
    assert second in wanted
    world.now += 2 * keeping.TO_GIVE
    assert asked_by(three, one, two) == first


def test_a_limit_below_what_is_committed_by_a_byte_is_reached(world):
    world.size = 2 * MIB
    one, two = world.engine("one"), world.engine("two")
    one.store(PER)
    two.store(PER)
    assert counted(world.folder) == 2 * MIB
    world.limit(2 * MIB - 1)
    turn(one, two)
    assert counted(world.folder) == MIB


def test_a_lower_limit_is_shared_by_those_that_answer(world):
    silent, one = world.engine("silent"), world.engine("one")
    silent.store(4 * PER, then=10)
    one.store(4 * PER)
    world.limit(5 * MIB)
    one.turn()
    assert one.memory.committed == MIB


def test_a_worker_that_cannot_register_ends_growth_and_nothing_else(world, one):
    one.store(PER)
    one.ranks.failing.add("register")
    assert one.store(PER) == []
    assert one.memory.committed == MIB
    assert "does not register" in one.keeper.broken
    world.now += 100
    assert one.store(PER) == []
    one.keeper.reset()
    one.turn()
    assert one.extents.free == PER


def test_what_is_not_deregistered_stays_committed_and_counted(one):
    one.store(3 * PER)
    one.ranks.failing.add("deregister")
    one.keeper.reset()
    one.keeper.turn()
    assert one.memory.committed == one.member.committed == 3 * MIB
    one.ranks.failing.clear()
    one.turn()
    assert one.memory.committed == MIB


@pytest.mark.parametrize("both", [False, True])
def test_a_worker_that_failed_once_is_asked_again(world, one, both):
    """Also where it did not answer, and nobody knows what it has registered."""
    one.store(PER)
    one.ranks.failing = {"register", "deregister"} if both else {"register"}
    one.keeper.need(PER)
    one.keeper.turn()
    for _ in range(3):
        world.now += keeping.AGAIN
        one.keeper.turn()
        held = MIB * (1 + both)
        assert one.memory.committed == one.member.committed == held, "counted twice"
        assert "it does not" in one.keeper.broken
    one.ranks.failing.clear()
    world.after(keeping.AGAIN, one)
    assert len(one.store(PER)) == PER
    assert one.keeper.broken == ""


def test_an_engine_that_ends_gives_back_what_a_worker_has_not_undone(world, one):
    one.ranks.failing = {"register", "deregister"}
    one.keeper.turn()
    assert one.member.committed == MIB
    one.keeper.close()
    assert one.member.committed == 0
    world.engines.clear()


def test_memory_that_is_not_there_is_tried_again_later(world, one, monkeypatch):
    one.store(PER)
    commit = one.memory.commit
    monkeypatch.setattr(one.memory, "commit", raising(OSError(28, "No space left on device")))
    assert one.store(PER) == []
    assert one.member.committed == MIB
    assert "No space left" in one.keeper.broken
    monkeypatch.setattr(one.memory, "commit", commit)
    assert one.store(PER) == []
    world.after(keeping.AGAIN, one)
    assert one.keeper.broken == ""
    assert len(one.store(PER)) == PER


def test_without_the_ledgers_lock_no_store_waits(one, monkeypatch):
    assert one.keeper.need(PER)
    monkeypatch.setattr(one.member, "look", raising(ledger.Busy))
    one.turn()
    assert not one.keeper.need(PER)


def test_without_its_record_an_engine_gives_everything_back(one):
    one.store(3 * PER)
    one.member.path.unlink()
    one.turn(2)
    assert one.memory.committed == 0
    assert "record" in one.keeper.broken
    assert not one.keeper.need(1)


def test_an_engine_whose_record_was_removed_joins_again(world, one):
    """As by systemd-logind with RemoveIPC=yes, when its user logs out."""
    one.store(3 * PER)
    one.member.held_by({os.getppid()})
    world.limit(2 * MIB)
    shutil.rmtree(world.folder)
    one.turn(3)
    assert one.memory.committed == 0
    world.after(keeping.AGAIN, one, one)
    assert one.keeper.broken == ""
    assert len(one.store(3 * PER)) == 3 * PER, "the limit is the one that it was started with"
    assert counted(world.folder) == one.member.committed
    (peer,) = world.engine("two").member.look(0, 0.0).peers
    file = os.open(peer.path, os.O_RDONLY)
    assert {pid for pid, _ in record.read_processes(file)} == {os.getpid(), os.getppid()}
    os.close(file)


def test_a_limit_that_was_lowered_stays_lowered_when_the_records_were_removed(world, one):
    world.limit(2 * MIB)
    one.turn()
    shutil.rmtree(world.folder)
    one.turn(3)
    world.after(keeping.AGAIN, one, one)
    assert one.keeper.broken == ""
    assert one.keeper.view.limit == 2 * MIB
    other = world.engine("two")  # that was started with the same size
    assert other.member.look(0, 0.0).limit == 2 * MIB


def test_an_engine_does_not_join_a_pool_of_another_size(world, one):
    shutil.rmtree(world.folder)
    world.size = 16 * MIB
    world.engine("two")
    one.turn(3)
    for _ in range(3):
        world.after(keeping.AGAIN, one, one)
        assert one.memory.committed == 0
        assert one.keeper.broken == keeping.REMOVED


def test_the_thread_survives_an_error(world, one, monkeypatch):
    turns = threading.Semaphore(0)

    def fails():
        turns.release()
        raise ValueError("a fault of ours")

    monkeypatch.setattr(one.keeper, "turn", fails)
    monkeypatch.setattr(one.keeper._stop, "wait", lambda seconds: None)
    one.keeper.start()
    for _ in range(3):
        one.keeper.wake()
        turns.acquire()
    assert "a fault of ours" in one.keeper.broken
    one.keeper.close()
    assert not one.keeper._thread.is_alive()
    world.engines.clear()


def test_between_two_looks_a_part_is_done(world):
    """So that it is not taken for an engine that does not answer."""
    world.size = 20 * MIB
    one = world.engine()
    one.keeper.need(18 * PER)
    one.keeper._wake.clear()
    one.turn()
    assert one.memory.committed == keeping.PER_TURN * MIB
    assert one.keeper._wake.is_set()
    one.turn(2)
    assert one.extents.free >= 18 * PER
    one.store(18 * PER)
    one.keeper.reset()
    one.keeper._wake.clear()
    one.turn()
    assert one.memory.committed >= 10 * MIB
    assert one.keeper._wake.is_set()
    one.turn(2)
    assert one.memory.committed == MIB


def test_engines_that_look_together_once_do_not_the_next_time(one):
    rests = set()
    for _ in range(8):
        one.turn()
        rests.add(one.keeper._rest)
    assert len(rests) > 1
    assert all(keeping.AT_REST / 2 <= rest <= keeping.AT_REST for rest in rests)
