"""Workers that register extents when they are asked to."""

import os
import threading
import time

import pytest

from kvpatch.pool import ranks
from kvpatch.pool.memory import Memory
from kvpatch.pool.ranks import Failed, Hello, Rank, Ranks

MIB = 1 << 20


class Device:
    """What a worker has registered, and whether it can."""

    def __init__(self):
        self.ranges = {}
        self.calls = []
        self.works = True

    def __call__(self, wanted, offset, size):
        self.calls.append((wanted, offset))
        if not self.works:
            return False
        if wanted:
            assert offset not in self.ranges
            self.ranges[offset] = size
        else:
            assert self.ranges.pop(offset) == size
        return True


@pytest.fixture
def engine(tmp_path):
    made = Ranks(tmp_path / "socket")
    yield made
    made.close()


def test_every_worker_registers_and_deregisters(engine):
    devices = [Device(), Device(), Device()]
    workers = [Rank(engine.path, device) for device in devices]
    assert engine.accept(3) == [Hello(os.getpid(), b"")] * 3
    assert not engine.path.exists()
    engine.register(0, MIB)
    engine.register(MIB, MIB)
    assert all(device.ranges == {0: MIB, MIB: MIB} for device in devices)
    engine.deregister(0, MIB)
    engine.deregister(0, MIB)  # again is no fault
    assert all(device.ranges == {MIB: MIB} for device in devices)
    for worker in workers:
        worker.close()
    assert all(device.ranges == {} for device in devices)


def test_where_one_worker_fails_the_others_take_it_back(engine):
    devices = [Device(), Device()]
    workers = [Rank(engine.path, device) for device in devices]
    engine.accept(2)
    failing = 0 if not devices[0].calls else 1
    devices[failing].works = False
    with pytest.raises(Failed, match="register"):
        engine.register(0, MIB)
    assert devices[1 - failing].ranges == {}
    devices[failing].works = True
    engine.register(0, MIB)
    devices[failing].works = False
    with pytest.raises(Failed, match="deregister"):
        engine.deregister(0, MIB)
    devices[failing].works = True
    for worker in workers:
        worker.close()


def test_a_worker_that_is_gone_is_a_failure_from_then_on(engine):
    one, two = Rank(engine.path, Device()), Rank(engine.path, Device())
    engine.accept(2)
    one.close()
    for _ in range(2):
        with pytest.raises(Failed):
            engine.register(0, MIB)
    two.close()


def test_a_late_answer_is_not_taken_for_the_next_one(engine, monkeypatch):
    monkeypatch.setattr(ranks, "PATIENCE", 0.05)
    go_on, device = threading.Event(), Device()

    def late(wanted, offset, size):
        go_on.wait(60)
        return device(wanted, offset, size)

    other = Device()
    workers = [Rank(engine.path, late), Rank(engine.path, other)]
    engine.accept(2)
    with pytest.raises(Failed):
        engine.register(0, MIB)
    for _ in range(3):
        with pytest.raises(Failed, match="before"):
            engine.deregister(0, MIB)
    go_on.set()
    # As a worker whose container was frozen: it goes on, and so does the pool.
    monkeypatch.setattr(ranks, "PATIENCE", 60.0)
    deadline = time.monotonic() + 60
    while True:
        try:
            engine.deregister(0, MIB)
            break
        except Failed:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert device.ranges == other.ranges == {}
    engine.register(MIB, MIB)
    assert device.ranges == other.ranges == {MIB: MIB}
    device.works = False
    with pytest.raises(Failed, match="could not deregister"):
        engine.deregister(MIB, MIB)
    device.works = True
    for worker in workers:
        worker.close()


def test_a_worker_that_does_not_connect_is_a_failure(engine, monkeypatch):
    monkeypatch.setattr(ranks, "PATIENCE", 0.05)
    worker = Rank(engine.path, Device())
    with pytest.raises(Failed, match="1 of 2"):
        engine.accept(2)
    worker.close()


def test_the_socket_of_an_engine_that_was_killed_is_replaced(tmp_path):
    first = Ranks(tmp_path / "socket")
    second = Ranks(tmp_path / "socket")
    worker = Rank(tmp_path / "socket", Device())
    assert second.accept(1) == [Hello(os.getpid(), b"")]
    second.close()
    worker.close()
    first.close()
    with pytest.raises(OSError):
        Rank(tmp_path / "socket", Device())


@pytest.fixture
def memory():
    file = os.memfd_create("kvpatch-test")
    os.ftruncate(file, 1 << 40)
    made = Memory(file)
    yield made
    made.close()
    made.close()


def test_a_range_is_memory_from_commit_to_punch(memory):
    assert memory.committed == 0
    memory.commit(1 << 35, 20 * MIB + 4096)
    assert memory.committed == 20 * MIB + 4096
    memory.commit(0, MIB)
    memory.punch(1 << 35, 20 * MIB + 4096)
    assert memory.committed == MIB


def test_a_commit_that_fails_in_its_middle_leaves_nothing(memory, monkeypatch):
    from kvpatch.pool import memory as module

    call = module._fallocate
    calls = []

    def second_fails(file, mode, offset, size):
        calls.append(mode)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        call(file, mode, offset, size)

    monkeypatch.setattr(module, "_fallocate", second_fails)
    with pytest.raises(OSError):
        memory.commit(0, 3 * module.PIECE)
    assert len(calls) == 3
    assert memory.committed == 0


def test_the_kernels_errors_are_raised(memory):
    with pytest.raises(OSError) as error:
        memory.punch(0, 0)
    assert error.value.errno == 22
