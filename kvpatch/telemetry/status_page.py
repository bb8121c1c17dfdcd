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
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpatch.environ import STATUS_DIR
from kvpatch.process import start_ticks

PROTOCOL = 1
SIZE = 64 << 10

_MAGIC = b"KVPATCH\0"
_HEAD = struct.Struct("=8sI24sq")  # magic, protocol, version of kvpatch, pid
_BODY = struct.Struct("=II")  # bytes of JSON, their checksum


class Unreadable(Exception):
    """Not a status page, or one of another protocol; its message states which."""


@dataclass(frozen=True)
class Page:
    """The published state of one process.

    Attributes:
        pid: the process.
        kvpatch: the version of kvpatch in it.
        content: its facts and, for an engine, its state; see ``publisher`` and
            ``patches.metrics.snapshot``.
    """

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


def own_folder() -> Path:
    """Return this user's folder, created if necessary.

    Raises:
        OSError: it cannot be created, belongs to another user, or is open to others.
    """
    path = folder_of(os.getuid())
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not path.is_dir() or path.is_symlink() or status.st_uid != os.getuid():
        raise PermissionError(f"{path} is not a folder of this user")
    if status.st_mode & 0o077:
        raise PermissionError(f"{path} is open to other users; remove it")
    return path


def lives(page: Page) -> bool:
    """Whether the process that wrote ``page`` is running, and not a later one with its pid."""
    started = start_ticks(page.pid)
    return started is not None and started == page.content["started"]


class Writer:
    """Writes the page of one process.

    Raises:
        OSError: the page cannot be created.
    """

    def __init__(self, pid: int, version: str) -> None:
        self.path = own_folder() / f"{pid}.page"
        # Remove the page of an earlier process with this pid first: it may be held open.
        self.path.unlink(missing_ok=True)
        file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(file, SIZE)
            self._map = mmap.mmap(file, SIZE)
        finally:
            os.close(file)
        self._started = start_ticks(pid)
        # Written last, so that a page without a body is never read as one.
        self._head = _HEAD.pack(_MAGIC, PROTOCOL, version.encode()[:24], pid)

    def write(self, content: dict[str, Any]) -> None:
        """Publish ``content``, which must be JSON and fit in the page."""
        whole = content | {"written": time.monotonic(), "started": self._started}
        body = json.dumps(whole, separators=(",", ":"), default=str).encode()
        start = _HEAD.size + _BODY.size
        if start + len(body) > SIZE:
            raise ValueError(f"{len(body)} bytes do not fit a status page")
        self._map[start : start + len(body)] = body
        self._map[_HEAD.size : start] = _BODY.pack(len(body), zlib.crc32(body))
        self._map[: _HEAD.size] = self._head

    def remove(self) -> None:
        """Remove the page, when the process exits."""
        self.path.unlink(missing_ok=True)


def read(path: Path) -> Page:
    """Read a page; a page that is being written is read again.

    Raises:
        OSError: it was removed, or this user may not read it.
        Unreadable: it is not a page, or one of another protocol.
    """
    for _ in range(50):
        data = path.read_bytes()
        if len(data) < _HEAD.size or not data.startswith(_MAGIC):
            time.sleep(0.002)  # just created
            continue
        _, protocol, version, pid = _HEAD.unpack_from(data)
        kvpatch = version.rstrip(b"\0").decode(errors="replace")
        if protocol != PROTOCOL:
            raise Unreadable(
                f"pid {pid} runs kvpatch {kvpatch}, whose status page (protocol {protocol}) this "
                f"one cannot read (protocol {PROTOCOL}); use the kvpatch of its environment"
            )
        length, checksum = _BODY.unpack_from(data, _HEAD.size)
        start = _HEAD.size + _BODY.size
        body = data[start : start + length]
        if zlib.crc32(body) == checksum:
            return Page(pid, kvpatch, json.loads(body))
        time.sleep(0.002)
    raise Unreadable(f"{path} is not a status page")
