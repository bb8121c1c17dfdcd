"""The size of a folder of block files: a ledger of them, of which the oldest are removed first.

The ledger is an SQLite database in the folder itself, so that a store costs the same with a million
files as with ten, engines that share the folder agree, and a killed one leaves nothing half
changed. Files are removed, and room is reserved, inside of a transaction; bytes are read and
written outside of it. A reader has a file that is removed open and reads all of it, or misses it.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvpatch import private
from kvpatch.environ import TIER_SIZE, share
from kvpatch.logs import log
from kvpatch.patches.secondary_tiers.block_files import (
    ABANDONED,
    PARTS_OF_NAME,
    Ledger,
    own_folder,
)
from kvpatch.sizes import readable
from kvpatch.telemetry.fuse import Fuse

# Of the file system, what stays free: the smaller of the two.
FLOOR_BYTES, FLOOR_PART = 4 << 30, 0.05
_AT_ONCE = 32  # files that are chosen, removed and adopted with one statement
# Files of which a use waits for the ledger. Beyond, the oldest use is dropped: its file goes early.
_WAITING = 65_536
_TABLES = (
    "CREATE TABLE IF NOT EXISTS files"
    " (id INTEGER PRIMARY KEY, path TEXT UNIQUE, size INTEGER, used INTEGER)",
    "CREATE INDEX IF NOT EXISTS by_use ON files (used)",
    "CREATE TABLE IF NOT EXISTS folder (held INTEGER, adopted INTEGER)",
    "INSERT INTO folder SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM folder)",
)


class Full(OSError):
    """There is no room for a block, and no file that may be removed for it."""


def size_of(root: str) -> int:
    """Return the bytes that ``KVPATCH_TIER_SIZE`` gives a folder; 0 for no limit."""
    text = TIER_SIZE.read()
    if not text:
        return 0
    disk = os.statvfs(root)
    return share(text).of(disk.f_blocks * disk.f_frsize)


def ledger_of(root: Path) -> Path:
    """Return the ledger of this user's block files in a folder."""
    return root / f"kvpatch-{os.geteuid()}" / "files.db"


class Folder(Ledger):
    """This user's block files in the folder of a tier, of all engines and layouts.

    An engine without a size keeps the ledger too, where another one has made it.

    Args:
        root: the folder that the tiers share.
        limit: bytes of block files; 0 for no limit.
        patience: seconds for which another engine's transaction is waited for.
        removed: told the size of every file that is removed.
    """

    def __init__(
        self,
        root: str,
        limit: int,
        patience: float,
        removed: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.root = Path(root)
        self.limit = limit
        self.held = 0
        self.removed = removed
        self._patience = patience
        self._lock = threading.Lock()
        self._waiting = threading.Lock()
        # When files were used, and None for one that may be gone.
        self._uses: dict[str, int | None] = {}
        self._database: sqlite3.Connection | None = None
        self._file = (0, 0)
        self.adopting: threading.Thread | None = None

    @property
    def kept(self) -> bool:
        """Whether there is a ledger to keep."""
        return self.limit > 0 or ledger_of(self.root).exists()

    def reserve(self, path: str, size: int) -> None:
        """Make room for a file that is about to be written, and note it.

        Raises:
            Full: there is none, and the file must not be written.
            OSError: the ledger cannot be used.
        """
        if self.kept and not self._reserved(_name(path), size):
            raise Full(errno.ENOSPC, f"there is no room for a block of {readable(size)}", path)

    def _reserved(self, name: str, size: int) -> bool:
        if 0 < self.limit < size:
            return False
        with self._transaction() as database:
            now = time.time_ns()
            if self.limit and not self._make_room(database, size, now):
                return False  # and what was removed is
            # It counts from now on, and is removed only when its writer must be gone.
            _note(database, name, size, now + int(ABANDONED * 1e9))
            return True

    def _make_room(self, database: sqlite3.Connection, size: int, now: int) -> bool:
        """Remove the oldest files until there is room for ``size`` bytes; return whether there is.

        Others need the ledger meanwhile. So of what was over before, as after the size was lowered,
        a thread removes the rest. Some file systems give room back late. So below the floor twice
        the size of what is stored is removed and not all that lacks, and below half of it nothing
        is stored.
        """
        [(coming,)] = database.execute(
            "SELECT coalesce(sum(size), 0) FROM files WHERE used > ?", (now,)
        )
        disk = os.statvfs(self.root)
        floor = min(FLOOR_BYTES, int(disk.f_blocks * disk.f_frsize * FLOOR_PART))
        free = disk.f_bavail * disk.f_frsize - coming - size
        over = max(_held(database) + size - self.limit, min(floor - free, 2 * size))
        freed = 0
        while freed < over:
            if freed >= size:
                if self.adopting is None or not self.adopting.is_alive():
                    self.begin()
                return False
            removed = self._remove_oldest(database, over - freed, now)
            if not removed:
                return False
            freed += removed
        return bool(free >= floor // 2)

    def _remove_oldest(self, database: sqlite3.Connection, over: int, now: int) -> int:
        """Remove some of the oldest files; return their bytes, ``over`` or few more at most."""
        freed = 0
        oldest = database.execute(
            "SELECT path, size FROM files WHERE used <= ? ORDER BY used, id LIMIT ?",
            (now, _AT_ONCE),
        )
        for name, size in oldest.fetchall():
            if freed >= over:
                break
            self._remove(name, size)
            _forget(database, name)
            freed += size
        return freed

    def _remove(self, name: str, size: int) -> None:
        path = self.root / name
        try:
            path.unlink()
        except FileNotFoundError:
            return
        self.removed(size)
        with suppress(OSError):  # others are in it
            path.parent.rmdir()

    def use(self, path: str) -> None:
        """Note that a file was written, read or found, at the next ``settle``."""
        self._wait(path, time.time_ns())

    def lost(self, path: str) -> None:
        """Note that a file could not be written, or is gone, at the next ``settle``."""
        self._wait(path, None)

    def _wait(self, path: str, used: int | None) -> None:
        name = _name(path)
        if self.kept:
            with self._waiting:
                self._uses.pop(name, None)  # so that the oldest stays first
                self._uses[name] = used
                while len(self._uses) > _WAITING:
                    del self._uses[next(iter(self._uses))]

    def settle(self) -> None:
        """Write what was used to the ledger, for other engines, without waiting for them.

        Raises:
            OSError: the ledger is in use or cannot be used; the next ``reserve`` writes it.
        """
        while self._uses and self.kept:  # also what threads used that found this one at it
            with self._transaction(0.0):
                pass

    def _settle(self, database: sqlite3.Connection, uses: dict[str, int | None]) -> None:
        for name, used in uses.items():
            if used is None:
                if not os.path.lexists(self.root / name):
                    _forget(database, name)
                continue
            known = database.execute("UPDATE files SET used = ? WHERE path = ?", (used, name))
            if not known.rowcount:  # written by an engine that had no ledger
                with suppress(OSError):
                    _note(database, name, (self.root / name).lstat().st_size, used)

    def begin(self) -> None:
        """Adopt what is there, and remove what is over the size, on a thread."""

        def adopt() -> None:
            with Fuse(f"the size of {self.root}, as to older files"):
                self.adopt()

        self.adopting = threading.Thread(target=adopt, name="kvpatch-tier-size", daemon=True)
        self.adopting.start()

    def adopt(self) -> None:
        """Note the files that were there before the ledger, and remove what is over the size.

        Once per ledger, whose other users meanwhile know the files that they use.
        """
        if self.limit == 0:
            return
        with self._transaction() as database:
            [(adopted,)] = database.execute("SELECT adopted FROM folder")
        if not adopted:
            found: list[tuple[str, int, int]] = []
            for one in self._files():
                found.append(one)
                if len(found) == _AT_ONCE:
                    self._adopt(found)
                    found = []
            self._adopt(found)
            with self._transaction() as database:
                database.execute("UPDATE folder SET adopted = 1")
        freed = 1
        while freed:  # others need the ledger meanwhile
            with self._transaction() as database:
                over = _held(database) - self.limit
                freed = self._remove_oldest(database, over, time.time_ns())

    def _adopt(self, found: list[tuple[str, int, int]]) -> None:
        with self._transaction() as database:
            for name, size, used in found:
                known = database.execute("SELECT 1 FROM files WHERE path = ?", (name,)).fetchone()
                if known is None and (self.root / name).exists():
                    _note(database, name, size, used)

    def _files(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name, the size and the last use of the block files in this user's folders."""
        for layout in self.root.iterdir():
            with suppress(OSError):
                status = layout.lstat()
                # Plain vLLM's are open to others.
                if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                    continue
                for path in layout.glob("*/*/*.bin"):
                    with suppress(OSError):
                        status = path.lstat()
                        yield _name(str(path)), status.st_size, status.st_mtime_ns

    @contextmanager
    def _transaction(self, patience: float | None = None) -> Iterator[sqlite3.Connection]:
        patience = self._patience if patience is None else patience
        until = time.monotonic() + patience
        # Of threads that wait for one engine, the last waits no longer than the first.
        if not self._lock.acquire(timeout=patience):
            raise TimeoutError(errno.ETIMEDOUT, "another thread has the ledger of the tier")
        try:
            database = self._connected(max(0.0, until - time.monotonic()))
            database.execute("BEGIN IMMEDIATE")
            with self._waiting:
                uses, self._uses = self._uses, {}
            try:
                self._settle(database, uses)
                yield database
                self.held = _held(database)
                database.execute("COMMIT")
            except BaseException:
                with self._waiting:
                    self._uses = uses | self._uses
                with suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            if not isinstance(error, sqlite3.OperationalError):
                self._begin_anew()
            raise OSError(errno.EIO, f"the ledger of the tier cannot be used ({error})") from error
        finally:
            self._lock.release()

    def _connected(self, patience: float) -> sqlite3.Connection:
        """Return the database; the folder may have been removed, the database by another engine."""
        path = ledger_of(self.root)
        with suppress(FileNotFoundError):
            status = path.lstat()
            if self._database is not None and self._file == (status.st_dev, status.st_ino):
                self._database.execute(f"PRAGMA busy_timeout={int(patience * 1000)}")
                return self._database
        if self._database is not None:
            self._database.close()
            self._database = None
        own_folder(path.parent)
        database = sqlite3.connect(
            path, timeout=patience, isolation_level=None, check_same_thread=False
        )
        try:
            # Not synchronous: it holds for killed engines. After a power failure it is made anew.
            database.execute("PRAGMA synchronous=OFF")
            database.execute("PRAGMA journal_mode=PERSIST")
            database.execute("BEGIN IMMEDIATE")
            for statement in _TABLES:
                database.execute(statement)
            database.execute("COMMIT")
        except BaseException:
            database.close()  # and does not keep its lock until it is collected
            raise
        status = path.lstat()
        known, self._file = self._file, (status.st_dev, status.st_ino)
        self._database = database
        if known != (0, 0):
            self.begin()
        return database

    def _begin_anew(self) -> None:
        path = ledger_of(self.root)
        # Who has the lock makes it anew.
        with suppress(OSError), private.alone(path.parent, private.within(0.0)):
            status = path.lstat()
            if self._database is None or self._file == (status.st_dev, status.st_ino):
                log.warning("kvpatch: the ledger %s is damaged, and is made anew", path)
                path.unlink()
                path.with_name(f"{path.name}-journal").unlink(missing_ok=True)


def _name(path: str) -> str:
    """Return the name of a file in the folder that the tiers share."""
    return "/".join(path.split("/")[-PARTS_OF_NAME:])


def _held(database: sqlite3.Connection) -> int:
    [(held,)] = database.execute("SELECT held FROM folder")
    return int(held)


def _note(database: sqlite3.Connection, name: str, size: int, used: int) -> None:
    """Note a file of ``size`` bytes, last used at ``used`` nanoseconds."""
    _forget(database, name)
    database.execute("INSERT INTO files (path, size, used) VALUES (?, ?, ?)", (name, size, used))
    database.execute("UPDATE folder SET held = held + ?", (size,))


def _forget(database: sqlite3.Connection, name: str) -> None:
    found = database.execute("SELECT size FROM files WHERE path = ?", (name,)).fetchone()
    if found is not None:
        database.execute("DELETE FROM files WHERE path = ?", (name,))
        database.execute("UPDATE folder SET held = held - ?", found)
