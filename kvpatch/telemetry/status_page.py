"""The status page of a process: a small file in shared memory that only its user can read.

A file and not a socket, because a page can be read while its process is busy, stuck in a
call that holds the GIL, or dead: the cases in which it is needed.

The format of the header never changes, so that every kvpatch can identify a page that it
cannot read; the body is JSON in the protocol of the version that wrote it.
"""

from __future__ import annotations

import json
import mmap
import os
import shlex
import stat
import struct
import time
import zlib
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch.environ import STATUS_DIR
from kvpatch.process import start_ticks
from kvpatch.telemetry import schema

PROTOCOL = 1
SIZE = 64 << 10

_MAGIC = b"KVPATCH\0"
_HEAD = struct.Struct("=8sI24sq")  # magic, protocol, version of kvpatch, pid
_BODY = struct.Struct("=II")  # bytes of JSON, their checksum


class Unreadable(Exception):
    """Not a status page, or one of another protocol; its message states which."""


class Untrusted(PermissionError):
    """A folder of pages that somebody else made, or could write to."""


class Life(Enum):
    """What can be told from here about the process that wrote a page."""

    RUNS = "runs"
    EXITED = "exited"
    FOREIGN = "foreign"  # of another pid namespace, where its number means another process


class Page(NamedTuple):
    """The published state of one process; see ``publisher`` and ``patches.metrics.snapshot``."""

    pid: int
    kvpatch: str
    content: dict[str, Any]

    @property
    def age(self) -> float:
        """Seconds since it was written, on the monotonic clock."""
        return max(0.0, time.monotonic() - float(self.content["written"]))


def base() -> Path:
    """Return the folder that holds every user's folder of pages."""
    return Path(STATUS_DIR.read() or "/dev/shm")


def folder_of(uid: int) -> Path:
    """Return the folder of a user's pages."""
    return base() / f"kvpatch-status-{uid}"


def checked(folder: Path, uid: int) -> Path:
    """Return a folder of pages that only user ``uid`` can have filled, or Untrusted, or OSError."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid:
        whose = "this user" if uid == os.getuid() else f"user {uid}"
        raise Untrusted(f"{folder} is not a folder of {whose}")
    if status.st_mode & 0o077:
        raise Untrusted(f"{folder} is open to other users; remove it")
    return folder


def own_folder() -> Path:
    """Return this user's folder, created if necessary; OSError if it cannot be used."""
    path = folder_of(os.getuid())
    path.mkdir(mode=0o700, exist_ok=True)
    return checked(path, os.getuid())


def namespace() -> int | None:
    """Return the inode of this process's pid namespace, which numbers its own; None if not told."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - a link into the kernel
    except OSError:
        return None


def life(page: Page) -> Life:
    """Return whether the process that wrote ``page`` runs, and not a later one with its pid."""
    theirs, ours = page.content.get("namespace"), namespace()
    if theirs is not None and ours is not None and theirs != ours:
        return Life.FOREIGN
    started = start_ticks(page.pid)
    if started is not None and started == page.content["started"]:
        return Life.RUNS
    return Life.FOREIGN if theirs is None or ours is None else Life.EXITED


class Writer:
    """Writes the page of one process; OSError if it cannot be created, as of a full /dev/shm."""

    def __init__(self, pid: int, version: str) -> None:
        self._namespace = namespace()
        self.path, file = _create(own_folder(), pid, self._namespace)
        try:
            # Not ftruncate: a later write to a page of memory that a full /dev/shm cannot
            # give is a SIGBUS, which ends the process.
            os.posix_fallocate(file, 0, SIZE)
            self._map = mmap.mmap(file, SIZE)
            self._identity = _identity(os.fstat(file))
        except BaseException:
            self.remove()
            raise
        finally:
            os.close(file)
        self._started = start_ticks(pid)
        # Written last, so that a page without a body is never read as one.
        self._head = _HEAD.pack(_MAGIC, PROTOCOL, version.encode()[:24], pid)

    def write(self, content: dict[str, Any]) -> None:
        """Publish ``content``; for ValueError or TypeError the page keeps what it has."""
        whole = content | {
            "written": time.monotonic(),
            "started": self._started,
            "namespace": self._namespace,
        }
        body = json.dumps(whole, separators=(",", ":"), default=str).encode()
        start = _HEAD.size + _BODY.size
        if start + len(body) > SIZE:
            raise ValueError(f"{len(body)} bytes do not fit a status page")
        self._map[start : start + len(body)] = body
        self._map[_HEAD.size : start] = _BODY.pack(len(body), zlib.crc32(body))
        self._map[: _HEAD.size] = self._head

    def is_there(self) -> bool:
        """Return whether the page can be found: systemd removes files of a user who logs out."""
        try:
            return _identity(self.path.lstat()) == self._identity
        except OSError:
            return False

    def remove(self) -> None:
        """Remove the page, when the process exits."""
        self.path.unlink(missing_ok=True)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _create(folder: Path, pid: int, ours: int | None) -> tuple[Path, int]:
    """Create a page, which is not that of a living process; return its path and the open file."""
    path = folder / f"{pid}.page"
    try:
        if _may_remove(path, ours):
            path.unlink(missing_ok=True)
        return path, _new_file(path)
    except FileExistsError:
        # Of another pid namespace, maybe made just now.
        path = folder / f"{pid}-{ours or 0}.page"
        path.unlink(missing_ok=True)
        return path, _new_file(path)


def _new_file(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)


def _may_remove(path: Path, ours: int | None) -> bool:
    """Return whether a page, which may be held open, is surely of an earlier process."""
    try:
        earlier = read(path)
    except (OSError, Unreadable):
        return False
    return ours is not None and earlier.content.get("namespace") == ours


def of_process(folder: Path, pid: int) -> list[Page]:
    """Return the pages of processes ``pid`` in a folder: at most one per pid namespace."""
    found = []
    for path in (folder / f"{pid}.page", *sorted(folder.glob(f"{pid}-*.page"))):
        try:
            found.append(read(path))
        except (OSError, Unreadable):
            continue
    return found


def ended_in_order(found: Page, folder: Path) -> bool:
    """Return whether what started an exited process, as vLLM its engines, took its page away."""
    for _ in range(5):  # a worker's is its engine, an engine's the frontend
        known = found.content.get("server")
        server = known or found.content.get("parent")
        if not server:
            return False
        named = [
            one
            for one in of_process(folder, server["pid"])
            if one.content["started"] == server["started"]
        ]
        if not named:
            return bool(known)  # a parent without a page may never have had one
        found = named[0]
        if life(found) is not Life.EXITED:
            return False
    return False


def contents(path: Path, limit: int = SIZE) -> bytes:
    """Return a small file of a user's folder of pages; Unreadable if not surely theirs."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        owner = os.fstat(folder).st_uid
        # Not blocking: opening a pipe would wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(path.name, flags, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != owner:
            raise Unreadable(f"{path} is not a file of user {owner}")
        if status.st_size > limit:
            raise Unreadable(f"{path} is too large to be kvpatch's")
        data = b""
        while len(data) <= limit and (more := os.read(file, limit + 1 - len(data))):
            data += more
        return data[:limit]
    finally:
        os.close(file)


def read(path: Path) -> Page:
    """Read a page, again if it is being written; OSError, or Unreadable if it is none."""
    start = _HEAD.size + _BODY.size
    for _ in range(50):
        data = contents(path)
        if not any(data[:start]) or len(data) < start:
            time.sleep(0.002)  # just created
            continue
        if not data.startswith(_MAGIC):
            break
        _, protocol, version, pid = _HEAD.unpack_from(data)
        kvpatch = version.rstrip(b"\0").decode(errors="replace")
        if protocol != PROTOCOL:
            raise Unreadable(
                f"pid {pid} runs kvpatch {kvpatch}, whose status page (protocol {protocol}) this "
                f"one cannot read (protocol {PROTOCOL}); use the kvpatch of its environment"
            )
        length, checksum = _BODY.unpack_from(data, _HEAD.size)
        body = data[start : start + length]
        # The checksum of nothing is 0, that of a page whose body is not written yet.
        if body and zlib.crc32(body) == checksum:
            return Page(pid, kvpatch, _parsed(path, pid, body))
        time.sleep(0.002)
    raise Unreadable(f"{path} is not a status page; rm {shlex.quote(str(path))} removes it")


def _parsed(path: Path, pid: int, body: bytes) -> dict[str, Any]:
    if path.stem.partition("-")[0] != str(pid):
        raise Unreadable(f"{path} is not the status page of its name, but of pid {pid}")
    try:
        return schema.checked(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} is not a status page that this kvpatch can read: {error}") from (
            error
        )
