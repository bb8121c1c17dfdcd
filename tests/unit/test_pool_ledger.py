"""The ledger: the sum of what engines have, whoever is killed at whatever moment."""

import fcntl
import mmap
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import Pipe
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")  # of .venv; scripts/pythons is without

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_world import MIB, Engine, counted, in_child, join, killed_at, owner

from kvpatch import private
from kvpatch.pool import ledger, record
from kvpatch.pool.ledger import Busy, Foreign
from kvpatch.pool.member import Different, Lingers, Promised
from kvpatch.pool.member import join as join_as
from kvpatch.pool.record import Limit

HERE = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path_factory):
    """A pool's folder in memory, empty."""
    path = HERE / f"kvpatch-test-pool-{os.getpid()}-{os.urandom(4).hex()}"
    yield path
    for left in path.iterdir() if path.exists() else ():
        left.unlink()
    if path.exists():
        path.rmdir()


def engine(name):
    return pytest.fixture(lambda folder: join(folder, name=name), name=name)


one, two, three = map(engine, ("one", "two", "three"))


def unlock(member):
    """Drop the lock of a member's record, as if every process had dropped it."""
    fcntl.flock(member._file, fcntl.LOCK_UN)


@contextmanager
def locked(folder):
    """Keep the ledger's lock, for which nobody waits long meanwhile."""
    file = os.open(folder, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "TO_LOOK", 0.01)
        patch.setattr(ledger, "TO_START", 0.01)
        yield
    os.close(file)


def killed(folder, size, taken, name):
    """Let an engine take memory in a process of its own, which is then killed."""

    def engine():
        member = join(folder, size, name)
        assert member.take(taken)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_child(engine), 0)


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_engines_take_until_the_limit_and_no_further(folder):
    one, two = join(folder, 3 * MIB, "one"), join(folder, 3 * MIB, "two")
    assert one.take(MIB)
    assert two.take(MIB)
    assert not one.take(2 * MIB)
    assert one.take(MIB)
    assert not two.take(1)
    assert counted(folder) == 3 * MIB
    one.give(MIB)
    assert two.take(MIB)
    assert (one.committed, two.committed) == (MIB, 2 * MIB)


def test_the_last_engine_leaves_nothing(folder, one, two):
    one.leave()
    assert ledger.LIMIT in names(folder)
    two.leave()
    two.leave()
    assert names(folder) == set()
    assert ledger.show(folder) is None


def test_an_engine_that_was_started_with_another_size_is_refused(folder):
    one = join(folder, 3 * MIB, "one")
    with pytest.raises(Different) as different:
        join(folder, 4 * MIB, "two")
    assert different.value.size == 3 * MIB
    assert ledger.set_limit(folder, 2 * MIB)
    join(folder, 3 * MIB, "two").leave()
    one.leave()
    join(folder, 4 * MIB, "three").leave()  # nobody is left who would disagree


def test_floors_that_are_more_than_the_pool_are_refused(folder):
    def keeping(name, floor):
        return join_as(ledger.record_of(folder, name), 4 * MIB, owner(floor=floor))

    one, two = keeping("one", 2 * MIB), keeping("two", 2 * MIB)
    assert one.floor == 2 * MIB
    with pytest.raises(Promised) as promised:
        keeping("three", 1)
    assert promised.value.floors == 4 * MIB
    two.leave()
    keeping("three", 2 * MIB).leave()


def test_a_lower_limit_holds_at_once(folder):
    one = join(folder, 3 * MIB, "one")
    assert one.take(2 * MIB)
    assert ledger.set_limit(folder, MIB)
    assert not one.take(1)
    view = one.look(0, 0.0)
    assert (view.limit, view.total, view.own) == (MIB, 2 * MIB, 2 * MIB)
    assert ledger.show(folder)[0] == Limit(3 * MIB, MIB)
    one.leave()
    assert not ledger.set_limit(folder, MIB)


def test_the_limit_of_a_pool_that_never_was_cannot_be_set(folder):
    assert not ledger.set_limit(folder, MIB)
    assert ledger.show(folder) is None


def test_what_an_engine_publishes_is_seen_by_the_others(one, two):
    assert one.take(2 * MIB)
    one.look(resident=MIB, coldest=12.5)
    (peer,) = two.look(0, 0.0).peers
    assert peer.path == one.path
    assert (peer.owner.committed, peer.owner.resident) == (2 * MIB, MIB)
    assert (peer.owner.coldest, peer.owner.name) == (12.5, "model")
    now = time.monotonic()
    assert peer.answers(now)
    assert not peer.answers(now + ledger.SILENT + 1)


def test_an_engine_is_asked_once_and_for_the_most(one, two):
    (peer,) = two.look(0, 0.0).peers
    two.ask(peer, 2 * MIB)
    two.ask(peer, MIB)
    assert one.look(0, 0.0).asked == 2 * MIB
    one.answer()
    assert one.look(0, 0.0).asked == 0
    one.leave()
    two.ask(peer, MIB)  # it is gone


def test_what_is_asked_for_between_a_look_and_its_answer_is_not_lost(one, two, three):
    (peer,) = (peer for peer in two.look(0, 0.0).peers if peer.path == one.path)
    two.ask(peer, MIB)
    assert one.look(0, 0.0).asked == MIB
    three.ask(peer, MIB)  # the same, of another engine
    one.answer()
    assert one.look(0, 0.0).asked == MIB
    one.answer()
    assert one.look(0, 0.0).asked == 0


def test_what_was_given_is_not_given_again_where_the_answer_was_not_written(
    folder, one, two, monkeypatch
):
    (peer,) = two.look(0, 0.0).peers
    two.ask(peer, MIB)
    assert one.look(0, 0.0).asked == MIB
    with locked(folder):
        one.answer()
    assert one.look(0, 0.0).asked == 0
    two.ask(peer, MIB)
    assert one.look(0, 0.0).asked == MIB, "another question"


def test_a_limit_that_was_removed_is_there_again(folder, one):
    """A cleaner of /dev/shm takes what has not been written for days; records are, all the time."""
    assert one.take(2 * MIB)
    assert ledger.set_limit(folder, 4 * MIB)
    assert one.look(0, 0.0).limit == 4 * MIB
    for _ in range(2):
        (folder / ledger.LIMIT).unlink()
        assert one.look(0, 0.0).limit == 4 * MIB
    (folder / ledger.LIMIT).unlink()
    assert one.take(MIB)
    assert not one.take(2 * MIB)
    with pytest.raises(Different):
        join(folder, 16 * MIB, name="two")
    one.leave()
    assert list(folder.iterdir()) == []


def test_an_engine_whose_memory_is_not_freed_is_said(folder, monkeypatch):
    monkeypatch.setattr(ledger, "TO_START", 0.1)
    assert join(folder, name="one").counted
    with pytest.raises(Lingers, match="has not been freed"):
        join(folder, name="one")


def test_an_engine_whose_record_was_removed_takes_nothing_and_gives_all(folder):
    """As systemd-logind does with RemoveIPC, or an operator: nobody counts what it has."""
    engine = Engine(folder, "one")
    assert engine.grow(0)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert not engine.grow(1)
    view = engine.member.look(0, 0.0)
    assert (view.limit, view.own, view.asked) == (0, MIB, MIB)
    other = join(folder, name="other")  # it begins a pool of its own
    assert not engine.grow(1)
    assert other.take(MIB)
    other.give(MIB)
    engine.shrink(0)
    assert engine.memory.committed == engine.member.committed == 0
    engine.leave()
    assert counted(folder) == 0


def test_an_engine_whose_record_was_removed_leaves_that_of_the_next_one(folder, one):
    one.path.unlink()
    two = join(folder, name="one")
    one.leave()
    assert two.counted
    assert two.take(MIB)


def test_an_engine_that_ends_while_its_process_goes_on_counts_no_more(folder, one, two):
    """Also if the ledger's lock is not to be had just then."""
    assert two.take(MIB)
    with locked(folder):
        two.give(MIB)
        two.leave()
    assert one.look(0, 0.0).peers == []


def test_what_a_killed_engine_had_is_the_pools_again(folder):
    one = join(folder, 2 * MIB, "one")
    killed(folder, 2 * MIB, 2 * MIB, "two")
    assert one.take(2 * MIB)
    assert names(folder) == {ledger.LIMIT, one.path.name}


def test_what_the_last_killed_engine_left_is_removed_by_who_is_asked_to(folder):
    killed(folder, 8 * MIB, MIB, "one")
    left = names(folder)
    assert len(left) == 2
    assert ledger.show(folder) is None
    assert names(folder) == left
    assert ledger.show(folder, remove=True) is None
    assert names(folder) == set()


def test_what_a_killed_engine_had_counts_while_a_worker_has_its_memory(folder):
    one = join(folder, 2 * MIB, "one")
    reading, writing = os.pipe()

    def engine():
        other = join(folder, 2 * MIB, "two")
        assert other.take(MIB)

        def worker():
            held = ledger.hold(other.path)
            os.write(writing, os.getpid().to_bytes(4, "little"))
            time.sleep(1000)
            os.close(held)

        in_child(worker)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_child(engine), 0)
    worker = int.from_bytes(os.read(reading, 4), "little")
    try:
        assert not one.take(2 * MIB)
        assert one.look(0, 0.0).total == MIB
    finally:
        os.kill(worker, signal.SIGKILL)
    until = time.monotonic() + 30
    while not one.take(2 * MIB):
        assert time.monotonic() < until


def test_a_dead_engine_counts_until_its_processes_are_gone(one, two):
    """The lock goes before the memory where the kernel closes files in this order."""
    assert two.take(MIB)
    reading, writing = os.pipe()
    child = in_child(lambda: os.read(reading, 1) and None)
    two.held_by([child])
    unlock(two)
    view = one.look(0, 0.0)
    assert view.total == MIB
    assert view.peers[0].dying
    assert not view.peers[0].answers(time.monotonic())
    os.write(writing, b"x")
    os.waitpid(child, 0)
    assert one.look(0, 0.0).total == MIB, "this process is one of them"
    record.write_processes(two._file, [(os.getpid(), 1)])  # another one of the same pid
    assert one.look(0, 0.0).peers == []


def test_a_zombie_holds_no_memory(one, two):
    assert two.take(MIB)
    child = in_child(lambda: None)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    record.write_processes(two._file, [(child, 1)])
    unlock(two)
    assert one.look(0, 0.0).peers == []
    os.waitpid(child, 0)


@pytest.mark.parametrize(("size", "after"), [(4 * MIB, (0, 1)), (4 * ledger.FREED, (3.9, 4.1))])
def test_the_more_a_dead_engine_of_another_container_had_the_longer_it_counts(
    folder, monkeypatch, size, after
):
    """Nobody sees the processes of another pid namespace, whose memory is being freed."""
    one = join(folder, size, "one")
    two = join_as(ledger.record_of(folder, "two"), size, owner(namespace=1))
    assert two.take(size)
    unlock(two)
    now = time.monotonic()
    assert one.look(0, 0.0).total == size
    for seconds, gone in zip(after, (False, True), strict=True):
        monkeypatch.setattr(time, "monotonic", lambda at=now + ledger.UNSEEN + seconds: at)
        assert one.take(MIB) is gone
        assert (one.look(0, 0.0).peers == []) is gone


def test_a_dead_engine_has_what_is_being_freed_and_no_ceiling_and_no_floor(folder):
    def keeping(name, **fields):
        fields = {"floor": 3 * MIB, "ceiling": 4 * MIB, "namespace": 1, **fields}
        return join_as(ledger.record_of(folder, name), 4 * MIB, owner(**fields))

    one, two = keeping("one", floor=0), keeping("two")
    assert two.take(MIB)
    assert ledger.taken(one.look(0, 0.0).peers) == (MIB, 4 * MIB)
    unlock(two)
    view = one.look(0, 0.0)
    assert view.peers[0].dying
    assert ledger.taken(view.peers) == (MIB, 0)
    assert keeping("three").floor == 3 * MIB  # for which there is room


def test_an_engine_that_leaves_before_its_worker_counts_until_that_is_gone(one, two):
    held = ledger.hold(two.path)
    assert two.take(MIB)
    two.leave()
    assert one.look(0, 0.0).total == MIB
    os.close(held)
    record_file = os.open(two.path, os.O_RDWR)
    record.write_processes(record_file, [])
    os.close(record_file)
    assert one.look(0, 0.0).peers == []


def test_a_forked_worker_does_not_end_its_engines_part(folder, one):
    assert one.take(MIB)
    assert os.waitpid(in_child(one.leave), 0)[1] == 0
    assert counted(folder) == MIB


def test_an_engine_is_started_again_under_its_name(folder):
    killed(folder, 8 * MIB, MIB, "same")
    again = join(folder, name="same")
    assert again.counted
    assert counted(folder) == 0


def test_a_record_of_another_kvpatch_stops_who_cannot_read_it(folder, one, two):
    os.pwrite(two._file, b"kvpool9\0", 0)
    assert not one.take(MIB)
    with pytest.raises(Foreign):
        one.look(0, 0.0)
    with pytest.raises(Foreign):
        join(folder, name="three")
    two._file = os.open(two.path, os.O_RDONLY) if os.close(two._file) is None else -1


def test_who_holds_the_lock_for_ever_stops_only_growth(folder, one, monkeypatch):
    assert one.take(2 * MIB)
    with locked(folder):
        assert not one.take(MIB)
        one.give(MIB)
        assert one.look(0, 0.0).own == MIB, "a look needs no lock"
        assert record.read_owner(one._file).committed == MIB
        with pytest.raises(Busy):
            join(folder, name="two")
    assert one.look(0, 0.0).own == MIB
    assert counted(folder) == MIB


def test_a_look_takes_the_lock_only_for_what_is_to_be_changed(one, two, three, monkeypatch):
    """Of 64 engines that all look it would be held most of the time."""
    assert two.take(MIB)
    taken = []
    alone = ledger.alone
    monkeypatch.setattr(ledger, "alone", lambda *words: taken.append(words[1]) or alone(*words))
    view = one.look(MIB, 12.5, 0.5)
    assert (view.limit, view.total, view.asked, len(view.peers)) == (8 * MIB, MIB, 0, 2)
    two.give(MIB)
    assert one.look(0, 0.0).total == 0
    assert taken == []
    (peer,) = (peer for peer in view.peers if peer.path == two.path)
    assert peer.owner.committed == MIB
    one.ask(peer, MIB)
    taken.clear()
    assert two.look(0, 0.0).asked == MIB
    assert len(taken) == 1, "what is asked for is read with the lock"
    two.answer()
    three.leave()
    taken.clear()
    assert [peer.path for peer in one.look(0, 0.0).peers] == [two.path]
    assert taken == []


def test_a_folder_that_others_can_enter_is_refused(folder):
    folder.mkdir(mode=0o755)
    with pytest.raises(private.Unsafe):
        join(folder)


def test_a_folder_that_others_can_enter_is_neither_shown_nor_changed(folder):
    """Another user may have made it, and says in it what he likes."""
    folder.mkdir(mode=0o700)
    (folder / ledger.LIMIT).touch()
    folder.chmod(0o777)
    for ask in (ledger.show, lambda folder: ledger.set_limit(folder, MIB)):
        with pytest.raises(private.Unsafe):
            ask(folder)


def test_records_of_many_processes_and_long_names_fit(folder):
    one = join_as(ledger.record_of(folder, "one"), MIB, owner(name="é" * 100))
    one.held_by([os.getpid()] * 200)
    assert len(record.read_processes(one._file)) == record.MOST_PROCESSES
    assert ledger.show(folder)[1][0].owner.name == "é" * 32


def life(folder):
    """Everything that an engine does, from its start to its end."""
    engine = Engine(folder, "life")
    for index in range(3):
        engine.grow(index)
    engine.shrink(1)
    engine.member.ask(engine.member.look(MIB, 1.0).peers[0], MIB)
    engine.member.answer()
    engine.grow(1)
    engine.leave()


def test_killed_at_any_system_call_an_engine_leaves_the_pool_whole(folder):
    watcher = join(folder, 8 * MIB, "watcher")
    points = 0
    while killed_at(points + 1, lambda: life(folder)):
        points += 1
        assert watcher.take(8 * MIB), f"killed at point {points}, it still has a part"
        watcher.give(8 * MIB)
        assert names(folder) - {f"memory-{pid}" for pid in range(1)} >= {ledger.LIMIT}
        for left in folder.glob("memory-*"):  # its name is vLLM's, and covered by a claim
            left.unlink()
        assert watcher.look(0, 0.0).peers == []
        watcher.answer()
    assert points > 60
    watcher.leave()
    assert names(folder) == set()


def test_an_engines_record_is_never_below_what_the_kernel_counts(folder, monkeypatch):
    engine = Engine(folder, "one")
    seen = []

    def check():
        found = record.read_owner(engine.member._file)
        seen.append((found.committed, engine.memory.committed))
        assert found.committed >= engine.memory.committed

    from kvpatch.pool import memory

    call, write = memory._fallocate, os.pwrite

    def around(original):
        def called(*args):
            check()
            try:
                return original(*args)
            finally:
                check()

        return called

    monkeypatch.setattr(memory, "_fallocate", around(call))
    monkeypatch.setattr(os, "pwrite", around(write))
    for index in range(4):
        assert engine.grow(index)
    for index in range(4):
        engine.shrink(index)
    assert max(kernel for _, kernel in seen) == 4 * MIB
    assert seen[-1] == (0, 0)
    monkeypatch.undo()


class Pools(RuleBasedStateMachine):
    """Processes that join, grow, shrink, look, are killed and leave, under changing limits."""

    def __init__(self):
        super().__init__()
        self.folder = HERE / f"kvpatch-test-pool-{os.getpid()}-{os.urandom(4).hex()}"
        self.watcher = None
        self.engines = {}
        self.files = {}
        self.has = {}
        self.limit = 8 * MIB
        self.count = 0

    @initialize()
    def begin(self):
        self.watcher = join(self.folder, 8 * MIB, "watcher")

    @precondition(lambda self: len(self.engines) < 3)
    @rule()
    def start(self):
        self.count += 1
        name = f"engine {self.count}"
        ours, theirs = Pipe()

        def serve():
            ours.close()
            engine = Engine(self.folder, name)
            theirs.send(None)
            while True:
                what, *rest = theirs.recv()
                if what == "committed":
                    theirs.send(engine.memory.committed)
                elif what == "look":
                    theirs.send(engine.member.look(0, 0.0).total)
                else:
                    theirs.send(getattr(engine, what)(*rest))
                if what == "leave":
                    return

        pid = in_child(serve)
        theirs.close()
        self.engines[name] = pid, ours
        self.has[name] = set()
        assert ours.recv() is None

    def call(self, name, *what):
        self.engines[name][1].send(what)
        return self.engines[name][1].recv()

    def forget(self, name):
        pid, pipe = self.engines.pop(name)
        pipe.close()
        os.waitpid(pid, 0)
        del self.has[name]

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), count=st.integers(1, 4))
    def grow(self, data, count):
        name = data.draw(st.sampled_from(sorted(self.engines)))
        for _ in range(count):
            index = min(set(range(64)) - self.has[name])
            room = self.limit - sum(map(len, self.has.values())) * MIB >= MIB
            assert self.call(name, "grow", index) is room
            if room:
                self.has[name].add(index)

    @precondition(lambda self: any(self.has.values()))
    @rule(data=st.data())
    def shrink(self, data):
        name = data.draw(st.sampled_from(sorted(one for one in self.has if self.has[one])))
        index = data.draw(st.sampled_from(sorted(self.has[name])))
        self.call(name, "shrink", index)
        self.has[name].remove(index)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def kill(self, data):
        name = data.draw(st.sampled_from(sorted(self.engines)))
        os.kill(self.engines[name][0], signal.SIGKILL)
        self.forget(name)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def leave(self, data):
        name = data.draw(st.sampled_from(sorted(self.engines)))
        self.call(name, "leave")
        self.forget(name)

    @rule(size=st.integers(1, 12))
    def change_limit(self, size):
        self.limit = size * MIB
        assert ledger.set_limit(self.folder, self.limit)

    @invariant()
    def records_and_kernel_agree(self):
        if self.watcher is None:
            return
        expected = sum(map(len, self.has.values())) * MIB
        assert self.watcher.look(0, 0.0).total == expected
        for name, indices in self.has.items():
            assert self.call(name, "committed") == len(indices) * MIB

    def teardown(self):
        for name in list(self.engines):
            self.call(name, "leave")
            self.forget(name)
        if self.watcher is not None:
            self.watcher.leave()
            assert names(self.folder) == set()
            self.folder.rmdir()


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=6, stateful_step_count=15, deadline=None)


def test_many_processes_that_take_and_give_at_once_never_pass_the_limit(folder):
    """The kernel's own count of a filesystem that only the pool is on would be its sum."""
    watcher = join(folder, 5 * MIB, "watcher")
    seen = mmap.mmap(-1, 1)  # whether the watcher has, which the engines wait for

    def engine(name):
        one = Engine(folder, name, 5 * MIB)
        for turn in count():
            if turn >= 30 and seen[0]:
                break
            have = sum(one.grow(index) for index in range(1 + turn % 3))
            for index in range(have):
                one.shrink(index)
        one.leave()

    children = [in_child(lambda name=f"{number}": engine(name)) for number in range(4)]
    highest = 0
    ended = threading.Event()

    def watch():
        nonlocal highest
        while not ended.is_set():
            # A look takes no lock: it may add up what one engine had and another one has.
            with suppress(Busy), ledger.alone(folder, 10):
                highest = max(highest, watcher.look(0, 0.0).total)
                seen[0] = highest > 0

    thread = threading.Thread(target=watch)
    thread.start()
    statuses = [os.waitpid(child, 0)[1] for child in children]
    ended.set()
    thread.join()
    assert statuses == [0] * 4
    assert 0 < highest <= 5 * MIB
    assert watcher.look(0, 0.0).peers == []
