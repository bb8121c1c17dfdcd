"""Processes that take part in a pool and are killed before or after any of their system calls."""

import fcntl
import os
import signal
import time
import traceback
from contextlib import contextmanager

from kvpatch.pool import ledger, member, memory
from kvpatch.pool.memory import Memory
from kvpatch.pool.record import Owner

MIB = 1 << 20
# The calls by which the pool changes what others see.
CALLS = (
    (os, "open"),
    (os, "pwrite"),
    (os, "ftruncate"),
    (os, "unlink"),
    (fcntl, "flock"),
    (memory, "_fallocate"),
)


def owner(**fields):
    """A record of an engine that has nothing, with some fields set."""
    empty = Owner(0, 0, 64 * MIB, 0, MIB, 0.0, time.monotonic(), ledger.pid_namespace(), "model")
    return empty._replace(**fields)


def join(folder, size=8 * MIB, name=""):
    """Take part in a pool."""
    return member.join(ledger.record_of(folder, name or f"{os.getpid()}"), size, owner())


def memory_in(folder, size=64 * MIB):
    """Memory of a size, which has no name once it is there."""
    path = folder / f"memory-{os.getpid()}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    os.ftruncate(file, size)
    return Memory(file)


class Engine:
    """An engine's part: a member, and its memory."""

    def __init__(self, folder, name="", size=8 * MIB):
        self.member = join(folder, size, name)
        self.memory = memory_in(folder)

    def grow(self, index):
        """Commit an extent of one MiB, if the ledger lets it."""
        if not self.member.take(MIB):
            return False
        self.memory.commit(index * MIB, MIB)
        return True

    def shrink(self, index):
        """Give an extent back."""
        self.memory.punch(index * MIB, MIB)
        self.member.give(MIB)

    def leave(self):
        """End it in good order."""
        self.memory.close()
        self.member.leave()


def in_child(body):
    """Run ``body`` in a forked process, to its end; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def killed_at(nth, body):
    """Run ``body`` in a process that is killed at its n-th point; return whether it had so many.

    A point is before or after one of ``CALLS``.
    """

    def run():
        with points(nth):
            body()

    status = os.waitpid(in_child(run), 0)[1]
    assert status in (0, signal.SIGKILL), f"the child ended with {status}"
    return status != 0


@contextmanager
def points(nth):
    """Kill this process at its n-th point."""
    passed = 0

    def point():
        nonlocal passed
        passed += 1
        if passed == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(call):
        def called(*args, **kwargs):
            point()
            try:
                return call(*args, **kwargs)
            finally:
                point()

        return called

    originals = [(module, name, getattr(module, name)) for module, name in CALLS]
    for module, name, call in originals:
        setattr(module, name, around(call))
    try:
        yield
    finally:
        for module, name, call in originals:
            setattr(module, name, call)


def counted(folder):
    """What the records of a pool say is committed, together."""
    shown = ledger.show(folder)
    return 0 if shown is None else sum(peer.owner.committed for peer in shown[1])
