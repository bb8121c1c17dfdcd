"""Names that one engine at a time may use, among all engines that share /dev/shm.

Two engines collide over files in /dev/shm, so that is where a claim is: a locked file in a
folder that no other user can enter. Containers that share /dev/shm see each other's claims
whatever their network and process namespaces are, and the kernel drops a lock when the last
process that has it is gone. The files that a claim covers go with it: at its release, or when the
next engine starts.

Engines of two users do not see each other's claims; their files differ in the owner, which is
checked where such a file is opened.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import weakref
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvpatch import private, state
from kvpatch.refusal import Refusal

BASE = Path("/dev/shm")  # vLLM's and kvcached's too; neither of them has a setting for it
# Seconds for the lock of the folder. Who has it makes a few calls; a process that is stopped
# meanwhile has it for as long as it is.
TO_TAKE, TO_LOOK = 60.0, 2.0


class Taken(Exception):
    """Another engine has the name.

    Attributes:
        pid: its process, if it is known and in this pid namespace.
    """

    def __init__(self, pid: int | None) -> None:
        super().__init__(pid)
        self.pid = pid

    @property
    def holder(self) -> str:
        """The other engine, for a sentence."""
        if self.pid is None:
            return "another engine"
        of = " of this process" if self.is_here else ""
        return f"another engine{of} (pid {self.pid})"

    @property
    def is_here(self) -> bool:
        """Whether the other engine is in this process."""
        return self.pid == os.getpid()


class Claim:
    """A name that this process holds, until it is released, dropped, or the process ends.

    Forked workers hold it too: it is free when all of them are gone.
    """

    def __init__(self, path: Path, file: int) -> None:
        self._file = file
        # Of a copy of this object in a forked worker nothing is released.
        self.release = weakref.finalize(self, _release, path, file, os.getpid())

    def cover(self, *names: str) -> None:
        """Let files in /dev/shm go with the claim; their names are this engine's alone."""
        _write(self._file, [*_read(self._file)[2], *names])


class Held:
    """The claims of an engine, kept on its ``EngineCore``."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []


def hold(engine: Any, kind: str, name: str) -> Claim:
    """Claim a name for as long as an ``EngineCore`` lives.

    Raises:
        Taken: another engine, in this process or another one, has it.
        Refusal: the folder of claims cannot be used.
    """
    try:
        claim = take(kind, name)
    except private.Unsafe as error:
        raise error.refusal(
            "two engines could then use one name without noticing each other",
            "set KVPATCH=0",
        ) from error
    except TimeoutError as error:
        raise Refusal(
            f"the folder of claims {folder()} cannot be used",
            f"a process that is stopped or hangs has kept it locked for {TO_TAKE:g} s",
            f"continue or end that process (fuser -v {folder()}), or set KVPATCH=0",
            code="KVP419",
        ) from error
    except OSError as error:
        raise no_room(folder(), error) from error
    state.of(engine, Held).claims.append(claim)
    return claim


def no_room(path: Path, error: OSError) -> Refusal:
    """Return the refusal of an engine that cannot make a file in /dev/shm."""
    return Refusal(
        f"{path} cannot be made",
        f"it failed with {type(error).__name__}: {error.strerror or error}",
        f"make room in {BASE} (df -h {BASE}; --shm-size of a container), or set KVPATCH=0",
        code="KVP417",
    )


def release(engine: Any) -> None:
    """Release every claim of an ``EngineCore``."""
    held = state.find(engine, Held)
    while held is not None and held.claims:
        held.claims.pop().release()


def folder() -> Path:
    """Return the folder of this user's claims."""
    return BASE / f"kvpatch-claims-{outer_uid()}"


def outer_uid() -> int:
    """Return this user's uid outside of a container's user namespace, where files have it too."""
    uid = os.geteuid()
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, outside, count = map(int, line.split())
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid


def take(kind: str, name: str) -> Claim:
    """Claim a name.

    Args:
        kind: what the name is of; a part of a file's name.
        name: any text.

    Raises:
        Taken: it is claimed already.
        TimeoutError: a process keeps the folder of claims locked.
        OSError: the folder of claims cannot be used.
    """
    home = folder()
    private.make_folder(home)
    # The memory of a large tier takes minutes to free, which other engines do not wait for.
    with ExitStack() as memory, private.alone(home, private.within(TO_TAKE)):
        _remove_dropped(home, memory)
        path = home / _file_name(kind, name)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _read_holder(file)
            os.close(file)
            raise Taken(pid) from None
        _write(file)
    return Claim(path, file)


def held(kind: str, name: str, home: Path | None = None) -> bool:
    """Whether an engine holds a name, as far as this user can see.

    Args:
        kind, name: as claimed.
        home: the folder of claims of one user; this user's if None.
    """
    home = folder() if home is None else home
    path = home / _file_name(kind, name)
    try:
        if home != folder():  # another user may hold the lock of his folder for ever
            return _is_locked(path)
        with suppress(TimeoutError), private.alone(home, private.within(TO_LOOK)):
            return _is_locked(path)
        return _is_locked(path)
    except OSError:
        return False


def _is_locked(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _file_name(kind: str, name: str) -> str:
    # A name may have any characters and any length.
    plain = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)
    return f"{kind}-{plain[:64]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _remove_dropped(home: Path, memory: ExitStack) -> None:
    """Remove the claims of engines that are gone, and the files that they covered.

    The memory of the files is freed with ``memory``.
    """
    for path in home.iterdir():
        with suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                _remove_left(_read(file)[2], memory)
            finally:
                os.close(file)


def _release(path: Path, file: int, pid: int) -> None:
    if os.getpid() != pid:
        return
    with ExitStack() as memory:
        _remove_left(_read(file)[2], memory)
    # The folder may have been removed by hand. Who starts next removes what stays.
    with suppress(OSError), private.alone(path.parent, private.within(TO_LOOK)):
        path.unlink(missing_ok=True)
    fcntl.flock(file, fcntl.LOCK_UN)  # forked workers have copies
    os.close(file)


def _remove_left(names: Iterable[str], memory: ExitStack) -> None:
    for name in names:
        path = BASE / name
        with suppress(OSError):  # who ended orderly has removed it
            if path.parent == BASE and path.lstat().st_uid == os.geteuid():
                with suppress(OSError):  # with too many open files it is freed here
                    memory.callback(os.close, os.open(path, os.O_PATH | os.O_NOFOLLOW))
                path.unlink()


def _write(file: int, covered: Iterable[str] = ()) -> None:
    text = f"{os.getpid()} {_pid_namespace()} {'/'.join(covered)}"  # no name has a slash
    with suppress(OSError):  # a sentence and a file that is left need it; /dev/shm may be full
        os.pwrite(file, text.encode(), 0)


def _read(file: int) -> tuple[str, str, list[str]]:
    """Return the pid, its namespace and the covered files of a claim, as far as written."""
    text = os.pread(file, 1 << 16, 0).decode(errors="replace")
    pid, namespace, covered = [*text.split(" ", 2), "", ""][:3]
    return pid, namespace, [name for name in covered.split("/") if name]


def _read_holder(file: int) -> int | None:
    pid, namespace, _ = _read(file)
    return int(pid) if pid.isdigit() and namespace == _pid_namespace() else None


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it is no path
