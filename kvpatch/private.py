"""Files and folders at names that every user of the machine can guess, in /dev/shm and /tmp.

Another user may make such a name first, as a file, a folder or a link of his own. What is used
under it must therefore be this user's, and closed to all others; root's is refused as well,
because nobody but this user puts it there by design.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvpatch.refusal import Refusal


class Unsafe(OSError):
    """A file or folder that another user may have made, or can open.

    Args:
        path: the file or folder.
        fault: what is wrong with it, as the end of a sentence that begins with the path.
        remover: who can remove it, and how.
    """

    def __init__(self, path: Path, fault: str, remover: str) -> None:
        super().__init__(f"{path} {fault}")
        self.path = path
        self.fault = fault
        self.remover = remover

    def refusal(self, why: str, otherwise: str) -> Refusal:
        """Return the refusal of an engine that needs the path.

        Args:
            why: what could happen, as the end of a sentence that begins with "because".
            otherwise: what the operator can do if it cannot be removed.
        """
        return Refusal(str(self), why, f"{self.remover}, or {otherwise}", code="KVP416")


def make_folder(path: Path) -> None:
    """Make a folder that only this user can enter, or check the one that is there.

    Raises:
        Unsafe: it is another user's, open to others, or no folder.
        OSError: it cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    check_folder(path)


def check_folder(path: Path) -> None:
    """Check that only this user can enter a folder.

    Raises:
        Unsafe: it is another user's, open to others, or no folder.
        OSError: it is not there.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise _unsafe(path, status, f"is {_kind(status)} instead of a folder")
    _check(path, status)


def check_file(path: Path, status: os.stat_result, *, closed: bool = True) -> None:
    """Check that a regular file is this user's, under no other name.

    Args:
        path: its path, for the message.
        status: of the path without following a link, or of the open file.
        closed: whether no other user may open it.

    Raises:
        Unsafe: it is not.
    """
    if not stat.S_ISREG(status.st_mode):
        raise _unsafe(path, status, f"is {_kind(status)} instead of a file")
    _check(path, status, closed=closed)
    if status.st_nlink > 1:
        raise _unsafe(path, status, "has a second name (a hard link)")


def create(path: Path, data: bytes) -> None:
    """Make a file that only this user can open, with all of ``data`` in it or not at all.

    Raises:
        OSError: it is there already, or cannot be made.
    """
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def read(path: Path, limit: int) -> bytes:
    """Return a file that no other user can have written, but root.

    Args:
        path: the file, or a link to it.
        limit: bytes; a longer one is not kvpatch's.

    Raises:
        Unsafe: another user may have written it, or it is no file.
        OSError: it cannot be read, or is too long.
    """
    # Not blocking: opening a FIFO would wait for its writer.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _unsafe(path, status, f"is {_kind(status)} instead of a file")
        if status.st_uid not in (os.geteuid(), 0):
            raise _unsafe(path, status, f"belongs to {user(status.st_uid)}")
        if status.st_mode & 0o022:
            raise _unsafe(path, status, "can be written by other users (chmod go-w)")
        with os.fdopen(file, "rb", closefd=False) as opened:
            data = opened.read(limit + 1)
    finally:
        os.close(file)
    if len(data) > limit:
        raise OSError(f"it has more than {limit} bytes")
    return data


@contextmanager
def opened(path: Path, *, closed: bool = True) -> Iterator[int]:
    """Open a file of this user for reading, writing and locking; make it if it is missing.

    Args:
        path: the file.
        closed: whether no other user may open it.

    Yields:
        Its descriptor, which child programs do not inherit.

    Raises:
        Unsafe: it is another user's, open to others, or no file.
        OSError: it cannot be made.
    """
    try:
        # Neither follows a link nor waits for the other end of a FIFO.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        check_file(path, path.lstat(), closed=closed)  # says whose it is
        raise
    try:
        check_file(path, os.fstat(file), closed=closed)
        yield file
    finally:
        os.close(file)


def within(seconds: float) -> Callable[[int], None]:
    """Return a lock for ``alone`` that waits no longer; it raises TimeoutError, an OSError."""

    def lock(file: int) -> None:
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"its folder was locked for {seconds:g} s") from None
            time.sleep(0.01)

    return lock


@contextmanager
def alone(folder: Path, lock: Callable[[int], None]) -> Iterator[None]:
    """Keep all other users of a folder out, for the few calls in which its files are not settled.

    Args:
        folder: this user's.
        lock: locks the descriptor of the folder, or raises: who has it may be stopped.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        lock(file)
        try:
            yield
        finally:
            # Not by closing: a process that another thread forks meanwhile has a copy.
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _check(path: Path, status: os.stat_result, *, closed: bool = True) -> None:
    if status.st_uid != os.geteuid():
        raise _unsafe(path, status, f"belongs to {user(status.st_uid)}")
    if closed and status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise _unsafe(path, status, f"is open to other users (mode {mode:04o})")


def _unsafe(path: Path, status: os.stat_result, fault: str) -> Unsafe:
    if status.st_uid == os.geteuid():
        remover = f"remove it when no engine uses it (rm -r {shlex.quote(str(path))})"
    else:
        others = " or root" if status.st_uid else ""
        remover = f"have it removed by {user(status.st_uid)}{others}"
        if not fault.startswith("belongs"):
            fault += f" and belongs to {user(status.st_uid)}"
    return Unsafe(path, fault, remover)


def _kind(status: os.stat_result) -> str:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a special file")


def user(uid: int) -> str:
    """Return the name of a user with the uid, as far as this machine knows one."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"the user {uid}"
