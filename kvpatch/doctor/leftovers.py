"""Files that exited engines left behind in shared memory and /tmp.

The report deletes nothing: it names the command that removes a leftover of this user, and
the owner of any other. ``kvpatch clean --yes`` removes those that are surely nobody's.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import shlex
import shutil
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch import claims
from kvpatch.doctor import namespaces
from kvpatch.doctor.finding import Finding, Topic
from kvpatch.patches.elastic_memory.ipc_name import KIND as POOL_CLAIM
from kvpatch.process import start_ticks
from kvpatch.sizes import readable

TOPIC = Topic("leftovers")
SHM, TMP = Path("/dev/shm"), Path("/tmp")
# Seconds in which an engine that starts has made a file and not every process that opens it.
YOUNG = 60.0
# Bytes below which leftovers are no warning: vLLM kills its engines whenever it stops, and each
# leaves a status page and kvcached's sockets.
LIGHT = 1 << 20


class Kind(NamedTuple):
    """One kind of leftover, and how to determine that its engine has exited."""

    folder: Path
    pattern: str
    what: str
    group: str = ""  # a regular expression for the process group in its name, if it has one
    pid: str = ""  # the same for a process id
    pool: bool = False  # kvcached's, which no process keeps open, perhaps KVCACHED_IPC_NAME
    ledger: bool = False  # the host device's, or its lock, which no process keeps open


POOL = struct.Struct("qqq")  # kvcached's limit, bytes used and bytes reserved
KINDS = (
    Kind(SHM, "*", "kvcached's pool", group=r"^kvcached_\w*?_(\d+)(?:_\d+)?$", pool=True),
    Kind(SHM, "vllm_offload_*.mmap", "vLLM's CPU tier"),
    Kind(SHM, "vllm_dist_*", "vLLM's buffer between ranks"),
    Kind(SHM, "kvpatch-host-device-*", "the host device's ledger", ledger=True),
    Kind(SHM, "kvpatch-status-*/*.page", "an engine's status page", pid=r"^(\d+)\.page$"),
    Kind(TMP, "kvcached-tp-*", "kvcached's sockets"),
    Kind(TMP, "kvpatch-refusal-*", "a refusal on its way", pid=r"^kvpatch-refusal-(\d+)-"),
)
LEDGER = struct.Struct("=Qq"), struct.Struct("=qqq")  # its head, and a process with its bytes
# No engine's, so that doctor says nothing of them.
LOGS = Kind(TMP, "kvpatch-verify-*", "logs of kvpatch verify")


@dataclass(frozen=True)
class Leftover:
    """One file or folder whose engine has exited, or may have."""

    path: Path
    folder: Path  # the shared one that it is in
    what: str
    owner: str
    bytes: int  # of memory or disk
    mine: bool  # whether this user may remove it
    certain: bool  # its engine is known to have exited; others' cannot be inspected
    chosen: bool  # a pool under an operator's name, and so of an engine that claims none
    inode: int  # when it was looked at

    @property
    def sure(self) -> bool:
        """Whether it is this user's to remove, and surely of no engine that runs."""
        return self.mine and self.certain and not self.chosen

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "path": str(self.path),
            "what": self.what,
            "owner": self.owner,
            "bytes": self.bytes,
            "sure": self.sure,
        }


def check(kinds: Iterable[Kind] = KINDS, me: int | None = None) -> list[Finding]:
    """Report every leftover of vLLM, kvcached and kvpatch: one finding per kind and owner."""
    groups: dict[tuple[str, str, bool, bool], list[Leftover]] = {}
    for leftover in find(kinds, me):
        key = (leftover.what, leftover.owner, leftover.certain, leftover.chosen)
        groups.setdefault(key, []).append(leftover)
    if not groups:
        return [TOPIC.ok("none in /dev/shm and /tmp")]
    return [report(group) for group in groups.values()]


def report(group: list[Leftover]) -> Finding:
    """Return the line about leftovers of one kind and owner."""
    first, paths = group[0], [in_shell(leftover.path) for leftover in group]
    size = sum(leftover.bytes for leftover in group)
    total, tell = readable(size), TOPIC.note if size < LIGHT else TOPIC.warning
    one = len(group) == 1
    name = paths[0] if one else f"{len(group)} times"
    what = f"{first.what}, {name}, {total} of {first.owner}: "
    if first.certain:
        what += "its engine has exited" if one else "their engines have exited"
    else:
        what += f"whether {'it is' if one else 'they are'} in use cannot be seen from here"
    if first.sure and not one:
        return tell(what, "kvpatch clean lists them, kvpatch clean --yes removes them")
    if first.mine and first.certain:
        flag = "-r " if any(is_folder(leftover.path) for leftover in group) else ""
        return tell(what, f"rm {flag}{' '.join(paths)}")
    where = "" if one else f" ({', '.join(paths)})"
    if first.mine:
        remedy = (
            f"remove {'it' if one else 'them'} when no container that shares "
            f"{first.folder} runs an engine"
        )
        return TOPIC.note(what + where, remedy)
    return TOPIC.note(what + where, f"ask {first.owner} to remove it")


def find(kinds: Iterable[Kind], me: int | None = None) -> Iterator[Leftover]:
    """Yield the files that no running process uses; those of ``me``, or this user, are its own."""
    me = os.getuid() if me is None else me
    # All before the processes: what is made while these are read is nobody's leftover.
    candidates = list(_candidates(kinds))
    if not candidates:
        return
    used, hidden = paths_in_use()
    seen = cache(namespaces.all_are_seen)
    for kind, path, status in candidates:
        if any(name == str(path) or name.startswith(f"{path}/") for name in used):
            continue
        if kind.pool and has_an_engine(path.name, used):
            continue
        if kind.ledger and names_processes(path):
            continue
        mine, named = status.st_uid == me, bool(kind.pid or kind.group)
        certain = (mine or me == 0 or named) and seen(kind.folder, status.st_uid)
        # Of what names no process, one may have it that cannot be read, or be about to open it.
        young = time.time() - status.st_mtime < YOUNG
        certain = certain and (named or not (young or status.st_uid in hidden))
        owner = user(status.st_uid)
        chosen = kind.pool and not path.name.startswith("kvcached_")
        yield Leftover(
            path, kind.folder, kind.what, owner, size(path), mine, certain, chosen, status.st_ino
        )


def _candidates(kinds: Iterable[Kind]) -> Iterator[tuple[Kind, Path, os.stat_result]]:
    """Yield the files whose names are those of leftovers, and of no process that runs."""
    for kind in kinds:
        for path in sorted(kind.folder.glob(kind.pattern)):
            try:
                status = path.lstat()
                if path.parent != kind.folder and path.parent.is_symlink():
                    continue  # what is behind it is somebody's choice
                if kind.pool and not is_pool(path, status):
                    continue
            except OSError:
                continue  # removed meanwhile, or not readable
            if not names_a_living_process(kind, path.name):
                yield kind, path, status


def remove(leftover: Leftover) -> None:
    """Remove a file, or a folder and what is in it; no link is followed, nor a name used anew."""
    status = leftover.path.lstat()
    if status.st_ino != leftover.inode:
        raise OSError(errno.EBUSY, "another file has its name by now")
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(leftover.path)
    else:
        leftover.path.unlink()


def is_pool(path: Path, status: os.stat_result) -> bool:
    """Whether a file is a pool of kvcached, which identifies one by its size too."""
    if not stat.S_ISREG(status.st_mode) or status.st_size != POOL.size:
        return False
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        content = os.read(file, POOL.size)
    finally:
        os.close(file)
    limit, used, reserved = POOL.unpack(content) if len(content) == POOL.size else (0, 0, 0)
    return bool(limit > 0 and used >= 0 and reserved >= 0)


def names_processes(ledger: Path) -> bool:
    """Whether a process runs that a ledger of the host device has, or that of a lock beside it."""
    head, slot = LEDGER
    try:
        file = os.open(ledger.with_suffix(""), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        content = os.read(file, 1 << 16)[head.size :]
    except OSError:
        return True  # who has it is not known
    finally:
        os.close(file)
    whole = content[: len(content) // slot.size * slot.size]
    return any(
        pid > 0 and start_ticks(pid) == started for pid, started, _ in slot.iter_unpack(whole)
    )


def has_an_engine(pool: str, used: set[str]) -> bool:
    """Whether an engine holds this pool's name, or workers listen on its sockets."""
    name = re.sub(r"_g\d+$", "", pool)  # one pool per group of layers
    listening = f"{TMP}/kvcached-tp-{name}-"
    return any(path.startswith(listening) for path in used) or any(
        claims.held(POOL_CLAIM, name, home) for home in claims.BASE.glob("kvpatch-claims-*")
    )


def names_a_living_process(kind: Kind, name: str) -> bool:
    """Whether the process or process group in the name of a file is running."""
    if kind.group and (match := re.search(kind.group, name)):
        return _alive(-int(match[1]))
    if kind.pid and (match := re.search(kind.pid, name)):
        return _alive(int(match[1]))
    return False


def _alive(target: int) -> bool:
    try:
        os.kill(target, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


class InUse(NamedTuple):
    """What processes use."""

    paths: set[str]  # open, mapped or bound; an abstract socket by its name behind an ``@``
    hidden: set[int]  # users of Pythons whose paths cannot be read (not dumpable)


def paths_in_use() -> InUse:
    """Return what processes use, as far as is visible."""
    used, hidden = set(), set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            for line in (process / "maps").read_text().splitlines():
                parts = line.split(maxsplit=5)
                if len(parts) == 6 and parts[5].startswith(("/dev/shm/", "/tmp/")):
                    used.add(parts[5])
            for entry in (process / "fd").iterdir():
                target = os.readlink(entry)  # noqa: PTH115 - it may be no path
                if target.startswith(("/dev/shm/", "/tmp/")):
                    used.add(target)
        except PermissionError:
            hidden |= _users(process)
        except OSError:
            continue  # exited
    try:
        sockets = Path("/proc/net/unix").read_text().splitlines()
    except OSError:
        sockets = []
    bound = {line.split()[-1] for line in sockets if re.search("[/@]", line)}
    return InUse(used | bound, hidden)


def _users(process: Path) -> set[int]:
    """Return the users of a process that may be an engine's, of its status, which all can read."""
    with suppress(OSError):
        if not re.search(rb"python|vllm", (process / "cmdline").read_bytes(), re.IGNORECASE):
            return set()
        status = (process / "status").read_text()
        if found := re.search(r"^Uid:\t(.+)$", status, re.MULTILINE):
            return set(map(int, found[1].split()))
    return set()


def size(path: Path) -> int:
    """Return the bytes allocated to a file, or to all in a folder; no link is followed."""
    files = [path]
    if is_folder(path):
        for folder, folders, names in os.walk(path):
            files += [Path(folder, name) for name in (*folders, *names)]
    total = 0
    for file in files:
        try:
            total += file.lstat().st_blocks * 512
        except OSError:
            continue
    return total


def is_folder(path: Path) -> bool:
    """Whether it is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def in_shell(path: Path) -> str:
    """Return a path as a word of a shell command, without control characters of its name."""
    if str(path).isprintable():
        return shlex.quote(str(path))
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
        for byte in os.fsencode(path)
    )
    return f"$'{''.join(plain)}'"


def user(uid: int) -> str:
    """Return the name of a user, or the uid if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
