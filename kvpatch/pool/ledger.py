"""The ledger of a user's host pool: a limit, and what each engine has committed.

It is a folder in /dev/shm with a file per engine. The engine and its workers hold a lock on the
engine's file, which the kernel drops when the last of them is gone. A record is raised under a lock
on the folder, with which all of them are read; each engine lowers its own, and looks, without it.

    raised, then committed; punched, then lowered

so that wherever an engine is killed, its record is at least what it has.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from kvpatch import claims, private
from kvpatch.pool import record
from kvpatch.pool.record import Limit, Owner
from kvpatch.process import start_ticks

ENGINE, WORKERS = "engine-", "workers-"  # how the names of records, and of sockets, begin
LIMIT = "limit"
# Seconds for the lock of the folder, which is held for a few calls; to start, and to look.
TO_START, TO_LOOK = 10.0, 0.5
# Seconds after which an engine that has not looked is taken for one that does not answer.
SILENT = 3.0
# A dead engine whose processes cannot be seen: seconds, and bytes per second that the kernel frees.
UNSEEN, FREED = 1.0, 1 << 30


class Busy(TimeoutError):
    """Somebody holds the lock of the folder, and does not let it go."""


class Foreign(Exception):
    """A running engine has a record that another version of kvpatch wrote."""


class Peer(NamedTuple):
    """Another engine of the pool, or one that is shown to people.

    Attributes:
        path: of its record.
        owner: what it has.
        dying: it was killed, and the kernel may not have freed its memory.
    """

    path: Path
    owner: Owner
    dying: bool

    def answers(self, now: float) -> bool:
        """Return whether it has looked at the ledger lately."""
        return not self.dying and now - self.owner.looked < SILENT


class Taken(NamedTuple):
    """What the engines of a pool have, together.

    Attributes:
        committed: bytes, those included that are being freed.
        ceiling: bytes that those that run may have at most.
    """

    committed: int
    ceiling: int


def taken(peers: Iterable[Peer]) -> Taken:
    """Return what engines have, together."""
    every = list(peers)
    return Taken(
        sum(one.owner.committed for one in every),
        sum(one.owner.ceiling for one in every if not one.dying),
    )


def home(name: str = "") -> Path:
    """Return the folder of this user's pool of a name."""
    return claims.BASE / f"kvpatch-pool-{claims.outer_uid()}{'-' * bool(name)}{name}"


def record_of(folder: Path, name: str) -> Path:
    """Return the record of an engine, by a name that no other running engine has."""
    return folder / f"{ENGINE}{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def socket_of(record_path: Path) -> Path:
    """Return the socket of an engine for its workers, which it has while it starts."""
    return record_path.with_name(record_path.name.replace(ENGINE, WORKERS, 1))


def hold(path: Path) -> int:
    """Hold the record of an engine's memory in another process; return a descriptor to keep open.

    Raises:
        OSError: the engine is gone.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def set_limit(folder: Path, size: int) -> bool:
    """Set the limit of a pool that is in use; return whether there is one.

    Raises:
        Busy: the lock is not to be had.
        private.Unsafe: the folder is open to others, or another user's.
        OSError: the folder cannot be used.
    """
    try:
        private.check_folder(folder)
        with alone(folder, TO_START):
            limit = read_limit(folder)
            if limit is None or not survey(folder, None):
                return False
            write_limit(folder, Limit(limit.configured, size))
            return True
    except FileNotFoundError:
        return False


def show(folder: Path, remove: bool = False) -> tuple[Limit, list[Peer]] | None:
    """Return the limit and the engines of a pool; None if it is not in use.

    Args:
        folder: of the pool.
        remove: whether to remove the records of engines that are gone.

    Raises:
        Busy: the lock is not to be had.
        Foreign: a record cannot be read.
        private.Unsafe: the folder is open to others, or another user's.
        OSError: the folder cannot be used.
    """
    try:
        private.check_folder(folder)
        with alone(folder, TO_LOOK):
            peers = survey(folder, None, remove)
            limit = read_limit(folder)
            if remove:
                remove_limit(folder)
    except FileNotFoundError:
        return None
    return None if limit is None or not peers else (limit, peers)


def alone(folder: Path, patience: float) -> AbstractContextManager[None]:
    """Keep all other engines out.

    Raises:
        Busy: somebody else was in for longer than ``patience`` seconds.
    """

    def lock(file: int) -> None:
        busy = Busy(f"the host pool's lock was held for {patience} s")
        wait(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB), patience, busy)

    return private.alone(folder, lock)


def wait(attempt: Callable[[], None], patience: float, otherwise: Busy) -> None:
    """Try what raises BlockingIOError as long as others are in, for ``patience`` seconds.

    Raises:
        Busy: ``otherwise``, when they are over.
    """
    until, pause = time.monotonic() + patience, 0.0002
    while True:
        try:
            attempt()
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise otherwise from None
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def survey(folder: Path, own: Path | None, remove: bool = True) -> list[Peer]:
    """Return the engines but ``own``; with ``remove``, remove the records of those that are gone.

    The caller is alone.

    Raises:
        Foreign: a running engine's record cannot be read.
    """
    found = []
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(ENGINE) or path == own:
            continue
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        try:
            peer = _read(path, file)
            if peer is None and remove:
                path.unlink()
                socket_of(path).unlink(missing_ok=True)
        finally:
            os.close(file)
        if peer is not None:
            found.append(peer)
    return found


def glance(folder: Path, own: Path) -> list[Peer] | None:
    """Return the engines but ``own``, without the lock; None if one is gone, or joins.

    Trying a record's lock takes that of a dead engine for a moment: who tries it then counts the
    dead one until the next look.
    """
    found = []
    for path in folder.iterdir():
        if not path.name.startswith(ENGINE) or path == own:
            continue
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            owner = record.read_owner(file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            if owner is None:
                return None
        finally:
            os.close(file)
        found.append(Peer(path, owner, dying=False))
    return found


def _read(path: Path, file: int) -> Peer | None:
    """Return an engine, or None if it is gone."""
    owner = record.read_owner(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if owner is None:
            raise Foreign(path) from None
        return Peer(path, owner, dying=False)
    # All who held it are ending: its memory is freed before the last of them is gone.
    if owner is not None and owner.committed and not _freed(file, owner):
        return Peer(path, owner, dying=True)
    return None


def _freed(file: int, owner: Owner) -> bool:
    """Return whether the kernel has freed the memory of an engine whose lock is gone."""
    if owner.namespace == pid_namespace():
        return all(_gone(*one) for one in record.read_processes(file))
    since = record.read_dead(file)
    now = time.monotonic()
    if not since:
        record.write_dead(file, now)
        return False
    return now - since > UNSEEN + owner.committed / FREED


def _gone(pid: int, started: int) -> bool:
    now = start_ticks(pid)
    if now is not None:
        return now != started
    # A zombie; one of its threads may still be freeing what they shared.
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1
    except OSError:
        return True


def started(pids: Iterable[int]) -> list[tuple[int, int]]:
    """Return processes that are there, each with when it started, which no later one of it has."""
    return [(pid, ticks) for pid in pids if (ticks := start_ticks(pid)) is not None]


def pid_namespace() -> int:
    """Return the number of this process's pid namespace."""
    return Path("/proc/self/ns/pid").stat().st_ino


def read_limit(folder: Path) -> Limit | None:
    """Return the limit of a pool, None if it has none; the caller is alone."""
    try:
        file = os.open(folder / LIMIT, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return record.read_limit(file)
    finally:
        os.close(file)


def write_limit(folder: Path, limit: Limit) -> None:
    """Write the limit of a pool; the caller is alone."""
    file = os.open(folder / LIMIT, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        record.write_limit(file, limit)
    finally:
        os.close(file)


def remove_limit(folder: Path) -> None:
    """Remove the limit with the last engine; the caller is alone."""
    if not any(path.name.startswith(ENGINE) for path in folder.iterdir()):
        (folder / LIMIT).unlink(missing_ok=True)
