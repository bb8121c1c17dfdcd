"""An engine's part in a host pool: it joins, takes and gives what it commits, and leaves."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvpatch import private
from kvpatch.pool import ledger, record
from kvpatch.pool.ledger import Busy, Foreign, Peer
from kvpatch.pool.record import Ask, Limit, Owner


class Lingers(Busy):
    """An engine of the same name was killed, and the kernel has not freed its memory."""


class Different(Exception):
    """The running engines of the pool were started with another size.

    Attributes:
        size: theirs, in bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class Promised(Exception):
    """The running engines have floors that leave less of the pool than another one's floor.

    Attributes:
        floors: theirs, together, in bytes.
    """

    def __init__(self, floors: int) -> None:
        super().__init__(floors)
        self.floors = floors


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

    @property
    def part(self) -> float:
        """Bytes of the limit for each engine, if all had the same."""
        return self.limit / (1 + sum(not peer.dying for peer in self.peers))


class Member:
    """An engine's part in a pool, from ``join`` to ``leave``.

    Args:
        path: of its record.
        file: the record, locked.
        owner: what it has.
        limit: of the pool.
    """

    def __init__(self, path: Path, file: int, owner: Owner, limit: Limit) -> None:
        self.path = path
        self._file = file
        self._owner = owner
        self._limit = limit  # at the last look
        self._least = owner.floor  # that the operator wants it to keep
        self._keeps = False
        self._pid = os.getpid()
        self._asked = self._answered = Ask(0, 0.0)  # at the last look; what it has given
        self._processes = [os.getpid()]  # that hold its memory

    @property
    def committed(self) -> int:
        """The bytes that it has committed."""
        return self._owner.committed

    @property
    def floor(self) -> int:
        """The bytes that it may have and keep, whatever the others need."""
        return max(self._least, self._owner.committed) if self._keeps else self._least

    def keep(self, everything: bool) -> None:
        """Let it keep all that it has, or again only what the operator wants; on any thread.

        The others read it at its next look, and until then ask in vain.
        """
        self._keeps = everything

    @property
    def counted(self) -> bool:
        """Whether the others can see its record.

        An operator may remove it, and so does systemd-logind with RemoveIPC=yes when the user logs
        out: what it has is then in nobody's sum.
        """
        return os.fstat(self._file).st_nlink > 0

    @property
    def called(self) -> bool:
        """Whether the ledger has something for this engine since the last look; without its lock.

        Half of what is written meanwhile may be read: then there is one look too many.
        """
        try:
            ask, limit = record.read_ask(self._file), ledger.read_limit(self.path.parent)
        except OSError:
            return True  # the look says it
        return (ask.size > 0 and ask != self._answered) or limit != self._limit or not self.counted

    def bounded_by(self, size: int) -> None:
        """Note the bytes that it may have at most, for those who look at the pool."""
        self._owner = self._owner._replace(ceiling=size)
        with suppress(Busy, OSError), ledger.alone(self.path.parent, ledger.TO_LOOK):
            record.write_owner(self._file, self._owner)

    def take(self, size: int) -> bool:
        """Raise the record by ``size`` bytes, which may then be committed.

        Returns:
            False if the sum of all records would pass the limit, or cannot be known.
        """
        if not self.counted:
            return False
        with suppress(Busy, Foreign), ledger.alone(self.path.parent, ledger.TO_LOOK):
            peers = ledger.survey(self.path.parent, self.path)
            others = sum(peer.owner.committed for peer in peers)
            if others + self._owner.committed + size > self._read_limit().current:
                return False
            self._owner = self._owner._replace(committed=self._owner.committed + size)
            record.write_owner(self._file, self._owner)
            return True
        return False

    def give(self, size: int) -> None:
        """Lower the record by ``size`` bytes, which were punched.

        Without the lock: who adds the records up meanwhile finds what was, or what is.
        """
        self._owner = self._owner._replace(committed=self._owner.committed - size)
        record.write_owner(self._file, self._owner)

    def look(self, resident: int, coldest: float, reuse: float = 1.0) -> View:
        """Publish what the blocks of this engine are, and return what all engines have.

        Args:
            resident: bytes of its blocks.
            coldest: when the coldest of its extents was used last; 0 if it has none.
            reuse: chunks that it finds for each that it stores.

        Raises:
            Busy: the lock is not to be had.
            Foreign: another engine's record cannot be read.
        """
        if not self.counted:  # nothing may stay that nobody counts
            return View(0, self._owner.committed, [], self._owner.committed)
        self._owner = self._owner._replace(
            resident=resident,
            floor=self.floor,
            coldest=coldest,
            reuse=reuse,
            looked=time.monotonic(),
        )
        record.write_owner(self._file, self._owner)  # nobody else writes it
        return self._glance() or self._look()

    def _glance(self) -> View | None:
        """Return what the files say, without the lock; None if something is to be changed there.

        Half of what another engine writes meanwhile may be read: it says who may be asked, and
        what is worth trying. Memory is taken with the lock, and an ask is read with it.
        """
        limit, ask = ledger.read_limit(self.path.parent), record.read_ask(self._file)
        if limit is None or ask.size:
            return None
        peers = ledger.glance(self.path.parent, self.path)
        if peers is None:
            return None
        self._limit, self._asked = limit, ask
        return View(limit.current, self._owner.committed, peers, 0)

    def _look(self) -> View:
        with ledger.alone(self.path.parent, ledger.TO_LOOK):
            peers = ledger.survey(self.path.parent, self.path)
            limit = self._read_limit()
            self._asked = record.read_ask(self._file)
            if self._asked == self._answered:  # the lock was not to be had then
                self._asked = Ask(0, 0.0)
                record.write_ask(self._file, self._asked)
        return View(limit.current, self._owner.committed, peers, self._asked.size)

    def _read_limit(self) -> Limit:
        """Return the limit, under the lock; write it again if a cleaner of /dev/shm removed it."""
        found = ledger.read_limit(self.path.parent)
        if found is None:
            ledger.write_limit(self.path.parent, self._limit)
        else:
            self._limit = found
        return self._limit

    def answer(self) -> None:
        """Note that what was asked for at the last look is being given back, or cannot be."""
        self._answered = self._asked
        with suppress(Busy, OSError), ledger.alone(self.path.parent, ledger.TO_LOOK):
            if record.read_ask(self._file) == self._asked:  # else somebody asked since
                record.write_ask(self._file, Ask(0, 0.0))

    def ask(self, peer: Peer, size: int) -> None:
        """Ask another engine to give back ``size`` bytes."""
        with suppress(OSError, Busy), ledger.alone(self.path.parent, ledger.TO_LOOK):
            file = os.open(peer.path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                size = max(size, record.read_ask(file).size)
                record.write_ask(file, Ask(size, time.monotonic()))
            finally:
                os.close(file)

    def held_by(self, pids: Iterable[int]) -> None:
        """Note which other processes hold its memory; each of them has called ``hold``."""
        self._processes = [os.getpid(), *pids]
        record.write_processes(self._file, ledger.started(self._processes))

    def join_again(self) -> None:
        """Take part again after the record was removed; nothing may be committed.

        The workers hold no lock on the new one. Where the engine is killed, it counts until the
        processes that it names are gone.

        Raises:
            Different, Promised, Foreign, Busy, OSError: as ``join``.
        """
        assert not self._owner.committed, "nobody counted it"
        again = join(self.path, self._limit.configured, self._owner, self._limit)
        os.close(self._file)
        self._file, self._limit = again._file, again._limit
        record.write_processes(self._file, ledger.started(self._processes))

    def leave(self) -> None:
        """End this engine's part; its memory has been freed, or goes with its processes."""
        if self._file < 0 or os.getpid() != self._pid:
            return
        # Also without the lock, when this process goes on and would be taken for one that ends.
        record.write_owner(self._file, self._owner)
        with suppress(Busy, OSError), ledger.alone(self.path.parent, ledger.TO_LOOK):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked worker has a copy
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.counted:  # else what is there is the next one's
                    self.path.unlink()
            except BlockingIOError:
                pass  # a worker still has the memory; who looks next removes the record
            ledger.remove_limit(self.path.parent)
        os.close(self._file)
        self._file = -1


def join(path: Path, size: int, owner: Owner, known: Limit | None = None) -> Member:
    """Take part in the pool of a folder, with nothing committed.

    Args:
        path: of the engine's record, see ``record_of``; its folder is made if it is missing.
        size: the limit, which all running engines must have been started with.
        owner: how the record begins.
        known: the limit if the pool has none, as somebody may have set it; None for ``size``.

    Raises:
        Different: the running engines were started with another size.
        Promised: the floors of all of them are more than the pool.
        Foreign: a running engine's record cannot be read.
        Lingers: an engine of the same name was killed, and its memory is not freed.
        Busy: the lock is not to be had.
        private.Unsafe: the folder is open to others, or another user's.
        OSError: there is no room in /dev/shm.
    """
    private.make_folder(path.parent)
    # What is left of an engine of the same name that was killed a moment ago.
    lingers = Lingers("the memory of an engine with this engine_id has not been freed")
    ledger.wait(lambda: _gone_from(path), ledger.TO_START, lingers)
    with ledger.alone(path.parent, ledger.TO_START):
        others = ledger.survey(path.parent, None)
        limit = ledger.read_limit(path.parent)
        if limit is None or all(peer.dying for peer in others):
            limit = known or Limit(size, size)
            ledger.write_limit(path.parent, limit)
        elif limit.configured != size:
            raise Different(limit.configured)
        floors = sum(peer.owner.floor for peer in others if not peer.dying)
        if floors + owner.floor > size:
            raise Promised(floors)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            os.ftruncate(file, record.SIZE)
            record.write_processes(file, ledger.started((os.getpid(),)))
            record.write_owner(file, owner)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
    return Member(path, file, owner, limit)


def _gone_from(path: Path) -> None:
    with ledger.alone(path.parent, ledger.TO_START):
        if any(peer.path == path for peer in ledger.survey(path.parent, None)):
            raise BlockingIOError
