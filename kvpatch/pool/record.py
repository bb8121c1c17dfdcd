"""How an engine's record in the ledger is written: one file, of four parts.

Each part is written in one call inside one page, which the kernel completes also for a process
that is being killed.

    owner      what the engine has; written by it alone
    ask        what another engine asks it to give back; written by the others
    dead       when it was found dead; written by the engine that found it
    processes  who holds its memory: the engine and its workers; written by it alone
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

MAGIC = b"kvpool3\0"  # another number for another layout
SIZE = 4096

_OWNER, _ASK, _DEAD, _PROCESSES = 0, 512, 1024, 2048
_owner = struct.Struct("<8s5Q2dQ64sd")
_ask = struct.Struct("<Qd")
_dead = struct.Struct("<d")
_process = struct.Struct("<IQ")
MOST_PROCESSES = 100

_limit = struct.Struct("<8sQQ")


class Owner(NamedTuple):
    """What an engine has.

    Attributes:
        committed: bytes that are, or are about to be, memory.
        resident: bytes of blocks in them.
        ceiling: bytes that the engine may have at most.
        floor: bytes that it may have, and keep, whatever the others need.
        extent: bytes of its extents.
        coldest: when the coldest of its extents was used last, on the monotonic clock; 0 if it has
            none.
        looked: when it looked at the ledger last, on the monotonic clock.
        namespace: the pid namespace of its processes.
        name: of the model, for people.
        reuse: chunks that it finds for each that it stores.
    """

    committed: int
    resident: int
    ceiling: int
    floor: int
    extent: int
    coldest: float
    looked: float
    namespace: int
    name: str
    reuse: float = 1.0

    @property
    def lends(self) -> int:
        """Bytes that it has above its floor."""
        return max(0, self.committed - self.floor)


class Ask(NamedTuple):
    """How many bytes an engine is asked to give back, and when; 0 if it is not."""

    size: int
    at: float


class Limit(NamedTuple):
    """The limit that engines were started with, and the one that holds."""

    configured: int
    current: int


def write_owner(file: int, owner: Owner) -> None:
    """Write what an engine has."""
    name = owner.name.encode()[:64].decode(errors="ignore").encode()
    os.pwrite(file, _owner.pack(MAGIC, *owner[:-2], name, owner.reuse), _OWNER)


def read_owner(file: int) -> Owner | None:
    """Return what an engine has; None if it was never written, or by another kvpatch."""
    data = os.pread(file, _owner.size, _OWNER)
    if len(data) < _owner.size:
        return None
    magic, *fields, name, reuse = _owner.unpack(data)
    if magic != MAGIC:
        return None
    return Owner._make([*fields, name.rstrip(b"\0").decode(errors="replace"), reuse])


def write_ask(file: int, ask: Ask) -> None:
    """Write what an engine is asked to give back."""
    os.pwrite(file, _ask.pack(*ask), _ASK)


def read_ask(file: int) -> Ask:
    """Return what an engine is asked to give back."""
    data = os.pread(file, _ask.size, _ASK)
    return Ask(*_ask.unpack(data)) if len(data) == _ask.size else Ask(0, 0.0)


def write_dead(file: int, since: float) -> None:
    """Write when an engine was found dead."""
    os.pwrite(file, _dead.pack(since), _DEAD)


def read_dead(file: int) -> float:
    """Return when an engine was found dead; 0 if it was not."""
    data = os.pread(file, _dead.size, _DEAD)
    return float(_dead.unpack(data)[0]) if len(data) == _dead.size else 0.0


def write_processes(file: int, processes: Iterable[tuple[int, int]]) -> None:
    """Write who holds the memory: each process with its start, in ticks since boot."""
    packed = [_process.pack(*one) for one in processes][:MOST_PROCESSES]
    os.pwrite(file, b"".join(packed) + _process.pack(0, 0), _PROCESSES)


def read_processes(file: int) -> list[tuple[int, int]]:
    """Return who holds the memory."""
    data = os.pread(file, _process.size * (MOST_PROCESSES + 1), _PROCESSES)
    data = data[: len(data) - len(data) % _process.size]
    found = []
    for pid, started in _process.iter_unpack(data):
        if pid == 0:
            break
        found.append((pid, started))
    return found


def write_limit(file: int, limit: Limit) -> None:
    """Write the limit of a pool."""
    os.pwrite(file, _limit.pack(MAGIC, *limit), 0)


def read_limit(file: int) -> Limit | None:
    """Return the limit of a pool; None if it was never written, or by another kvpatch."""
    data = os.pread(file, _limit.size, 0)
    if len(data) < _limit.size:
        return None
    magic, *numbers = _limit.unpack(data)
    return Limit(*numbers) if magic == MAGIC else None
