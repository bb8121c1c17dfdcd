"""The ledger of a user's host pool: a limit, and what each engine has committed.

It is a folder in /dev/shm with a file per engine. The engine and its workers hold a lock on the
engine's file, which the kernel drops when the last of them is gone. All that counts is read and
written under a lock on the folder.

    raised, then committed; punched, then lowered

so that wherever an engine is killed, its record is at least what it has.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from kvpatch import claims, private
from kvpatch.pool import record
from kvpatch.pool.record import Ask, Limit, Owner
from kvpatch.process import start_ticks

ENGINE, WORKERS = "engine-", "workers-"  # how the names of records, and of sockets, begin
LIMIT = "limit"
# Seconds for the lock of the folder, which is held for a few calls; to start, and to look.
TO_START, TO_LOOK = 10.0, 0.5
# Seconds after which an engine that has not looked is taken for one that does not answer.
SILENT = 2.0
# A dead engine whose processes cannot be seen: seconds, and bytes per second that the kernel frees.
UNSEEN, FREED = 1.0, 1 << 30


class Busy(TimeoutError):
    """Somebody holds the lock of the folder, and does not let it go."""


class Different(Exception):
    """The running engines of the pool were started with another size.

    Attributes:
        size: theirs, in bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


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


class View(NamedTuple):
    """What an engine sees when it looks.

    Attributes:
        limit: bytes that all engines may have committed.
        own: bytes that it has committed itself.
        peers: the other engines.
        asked: bytes that it is asked to give back.
    """

    limit: int
    own: int
    peers: list[Peer]
    asked: int

    @property
    def total(self) -> int:
        """Bytes that all engines have committed."""
        return self.own + sum(peer.owner.committed for peer in self.peers)


def home(name: str = "") -> Path:
    """Return the folder of this user's pool of a name."""
    return claims.BASE / f"kvpatch-pool-{claims.outer_uid()}{'-' * bool(name)}{name}"


class Member:
    """An engine's part in a pool, from ``join`` to ``leave``.

    Args:
        path: of its record.
        file: the record, locked.
        owner: what it has.
    """

    def __init__(self, path: Path, file: int, owner: Owner) -> None:
        self.path = path
        self._file = file
        self._owner = owner
        self._pid = os.getpid()
        self._asked = Ask(0, 0.0)  # at the last look

    @property
    def committed(self) -> int:
        """The bytes that it has committed."""
        return self._owner.committed

    @property
    def counted(self) -> bool:
        """Whether the others can see its record.

        An operator may remove it, and so does systemd-logind with RemoveIPC=yes when the user logs
        out: what it has is then in nobody's sum.
        """
        return os.fstat(self._file).st_nlink > 0

    def bounded_by(self, size: int) -> None:
        """Note the bytes that it may have at most, for those who look at the pool."""
        self._owner = self._owner._replace(ceiling=size)
        with suppress(Busy, OSError), _alone(self.path.parent, TO_LOOK):
            record.write_owner(self._file, self._owner)

    def take(self, size: int) -> bool:
        """Raise the record by ``size`` bytes, which may then be committed.

        Returns:
            False if the sum of all records would pass the limit, or cannot be known.
        """
        if not self.counted:
            return False
        with suppress(Busy, Foreign), _alone(self.path.parent, TO_LOOK):
            limit = _read_limit(self.path.parent)
            others = sum(peer.owner.committed for peer in _survey(self.path.parent, self.path))
            if limit is None or others + self._owner.committed + size > limit.current:
                return False
            self._owner = self._owner._replace(committed=self._owner.committed + size)
            record.write_owner(self._file, self._owner)
            return True
        return False

    def give(self, size: int) -> None:
        """Lower the record by ``size`` bytes, which were punched."""
        self._owner = self._owner._replace(committed=self._owner.committed - size)
        # If not now, at the next look; the folder may have been removed.
        with suppress(Busy, OSError), _alone(self.path.parent, TO_LOOK):
            record.write_owner(self._file, self._owner)

    def look(self, resident: int, coldest: float) -> View:
        """Publish what the blocks of this engine are, and return what all engines have.

        Args:
            resident: bytes of its blocks.
            coldest: when the coldest of its extents was used last; 0 if it has none.

        Raises:
            Busy: the lock is not to be had.
            Foreign: another engine's record cannot be read.
        """
        if not self.counted:  # nothing may stay that nobody counts
            return View(0, self._owner.committed, [], self._owner.committed)
        with _alone(self.path.parent, TO_LOOK):
            self._owner = self._owner._replace(
                resident=resident, coldest=coldest, looked=time.monotonic()
            )
            record.write_owner(self._file, self._owner)
            peers = _survey(self.path.parent, self.path)
            limit = _read_limit(self.path.parent)
            self._asked = record.read_ask(self._file)
        current = limit.current if limit is not None else 0
        return View(current, self._owner.committed, peers, self._asked.size)

    def answer(self) -> None:
        """Note that what was asked for at the last look is being given back, or cannot be."""
        with suppress(Busy, OSError), _alone(self.path.parent, TO_LOOK):
            if record.read_ask(self._file) == self._asked:  # else somebody asked since
                record.write_ask(self._file, Ask(0, 0.0))

    def ask(self, peer: Peer, size: int) -> None:
        """Ask another engine to give back ``size`` bytes."""
        with suppress(OSError, Busy), _alone(self.path.parent, TO_LOOK):
            file = os.open(peer.path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                size = max(size, record.read_ask(file).size)
                record.write_ask(file, Ask(size, time.monotonic()))
            finally:
                os.close(file)

    def held_by(self, pids: Iterable[int]) -> None:
        """Note which other processes hold its memory; each of them has called ``hold``."""
        record.write_processes(self._file, _started((os.getpid(), *pids)))

    def leave(self) -> None:
        """End this engine's part; its memory has been freed, or goes with its processes."""
        if self._file < 0 or os.getpid() != self._pid:
            return
        # Also without the lock, when this process goes on and would be taken for one that ends.
        record.write_owner(self._file, self._owner)
        with suppress(Busy, OSError), _alone(self.path.parent, TO_LOOK):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked worker has a copy
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.path.unlink()
            except BlockingIOError:
                pass  # a worker still has the memory; who looks next removes the record
            _remove_limit(self.path.parent)
        os.close(self._file)
        self._file = -1


def record_of(folder: Path, name: str) -> Path:
    """Return the record of an engine, by a name that no other running engine has."""
    return folder / f"{ENGINE}{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def socket_of(record_path: Path) -> Path:
    """Return the socket of an engine for its workers, which it has while it starts."""
    return record_path.with_name(record_path.name.replace(ENGINE, WORKERS, 1))


def join(path: Path, size: int, owner: Owner) -> Member:
    """Take part in the pool of a folder, with nothing committed.

    Args:
        path: of the engine's record, see ``record_of``; its folder is made if it is missing.
        size: the limit, which all running engines must have been started with.
        owner: how the record begins.

    Raises:
        Different: the running engines were started with another size.
        Foreign: a running engine's record cannot be read.
        Busy: the lock is not to be had.
        private.Unsafe: the folder is open to others, or another user's.
        OSError: there is no room in /dev/shm.
    """
    private.make_folder(path.parent)
    # What is left of an engine of the same name that was killed a moment ago.
    _wait(lambda: _gone_from(path), TO_START)
    with _alone(path.parent, TO_START):
        others = _survey(path.parent, None)
        limit = _read_limit(path.parent)
        if limit is None or all(peer.dying for peer in others):
            _write_limit(path.parent, Limit(size, size))
        elif limit.configured != size:
            raise Different(limit.configured)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            os.ftruncate(file, record.SIZE)
            record.write_processes(file, _started((os.getpid(),)))
            record.write_owner(file, owner)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
    return Member(path, file, owner)


def _gone_from(path: Path) -> None:
    with _alone(path.parent, TO_START):
        if any(peer.path == path for peer in _survey(path.parent, None)):
            raise BlockingIOError


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
        with _alone(folder, TO_START):
            limit = _read_limit(folder)
            if limit is None or not _survey(folder, None):
                return False
            _write_limit(folder, Limit(limit.configured, size))
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
        with _alone(folder, TO_LOOK):
            peers = _survey(folder, None, remove)
            limit = _read_limit(folder)
            if remove:
                _remove_limit(folder)
    except FileNotFoundError:
        return None
    return None if limit is None or not peers else (limit, peers)


def _alone(folder: Path, patience: float) -> AbstractContextManager[None]:
    """Keep all other engines out.

    Raises:
        Busy: somebody else was in for longer than ``patience`` seconds.
    """

    def lock(file: int) -> None:
        _wait(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB), patience)

    return private.alone(folder, lock)


def _wait(attempt: Callable[[], None], patience: float) -> None:
    until, pause = time.monotonic() + patience, 0.0002
    while True:
        try:
            attempt()
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise Busy(f"the host pool's lock was held for {patience} s") from None
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _survey(folder: Path, own: Path | None, remove: bool = True) -> list[Peer]:
    """Return the engines but ``own``; with ``remove``, remove the records of those that are gone.

    The caller is alone.
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


def _started(pids: Iterable[int]) -> list[tuple[int, int]]:
    return [(pid, started) for pid in pids if (started := start_ticks(pid)) is not None]


def pid_namespace() -> int:
    """Return the number of this process's pid namespace."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _read_limit(folder: Path) -> Limit | None:
    try:
        file = os.open(folder / LIMIT, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return record.read_limit(file)
    finally:
        os.close(file)


def _write_limit(folder: Path, limit: Limit) -> None:
    file = os.open(folder / LIMIT, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        record.write_limit(file, limit)
    finally:
        os.close(file)


def _remove_limit(folder: Path) -> None:
    """Remove the limit with the last engine; the caller is alone."""
    if not any(path.name.startswith(ENGINE) for path in folder.iterdir()):
        (folder / LIMIT).unlink(missing_ok=True)
