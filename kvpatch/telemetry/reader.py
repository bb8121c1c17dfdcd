"""Finding pages, and deriving the state of a process from its page."""

from __future__ import annotations

import math
import os
import pwd
import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kvpatch.environ import STATUS_DIR
from kvpatch.sizes import readable
from kvpatch.telemetry import status_page as page
from kvpatch.telemetry.status_page import Life, Page

SILENT = 5.0  # seconds: ten intervals of the publishing thread
STUCK = 30.0  # seconds without a step while requests run, or in which nothing moves while all wait
MOST = 1000  # pages of processes that have ended, of one folder, that are read
_FOLDER = re.compile(r"kvpatch-status-([0-9]{1,10})")
_PAGE = re.compile(r"([0-9]{1,10})(?:-[0-9]+)?\.page")  # with the pid namespace, if another has it


class State(str, Enum):
    """The state of a process."""

    RUNS = "runs"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    STUCK = "stuck"
    WAITS = "waits"
    STOPPED = "stopped"
    SILENT = "silent"
    KILLED = "killed"
    GONE = "gone"
    ENDED = "ended"
    FOREIGN = "foreign"
    OTHER_USER = "other-user"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"


# States of an engine that is as its operator wants it.
WELL = (State.RUNS, State.SUSPENDING, State.SUSPENDED, State.RESUMING)
OVER = (State.KILLED, State.GONE, State.ENDED)
_PHASES = {  # of ``suspension.Phase``
    "pausing": State.SUSPENDING,
    "storing": State.SUSPENDING,
    "releasing": State.SUSPENDING,
    "suspended": State.SUSPENDED,
    "resuming": State.RESUMING,
}


def state_of(phase: str) -> State:
    """Return what the state of an engine is called while a verb is at ``phase``."""
    return _PHASES.get(phase, State.RUNS)


class Seen(NamedTuple):
    """One process, as far as this user can see it."""

    pid: int  # 0 if only the folder of another user is known
    state: State
    line: str = ""  # empty for a process that runs
    page: Page | None = None  # the last, if it can be read


def all_of(everyone: bool) -> list[Seen]:
    """Return every process that publishes on this machine, or also those that only root reads."""
    seen = list(_all_in(page.folder_of(os.getuid()), os.getuid()))
    if everyone:
        for folder in sorted(page.base().glob("kvpatch-status-*")):
            match = _FOLDER.fullmatch(folder.name)
            if match and int(match[1]) != os.getuid():
                seen += _all_in(folder, int(match[1]))
    return seen


def alive() -> list[Seen]:
    """Return this user's processes that publish and run here; the pages of others are not read."""
    ended = (*OVER, State.FOREIGN)
    found = [look(path) for path in _own() if _is_here(path.name)]
    return [seen for seen in found if seen.page is not None and seen.state not in ended]


def _own() -> list[Path]:
    """Return the files of this user's pages; none if their folder may be somebody else's."""
    folder = page.folder_of(os.getuid())
    try:
        page.checked(folder, os.getuid())
        names = _sorted(one.name for one in folder.iterdir() if one.name.endswith(".page"))
    except OSError:
        return []
    return [folder / name for name in names]


def _all_in(folder: Path, uid: int) -> Iterator[Seen]:
    try:
        page.checked(folder, uid)
        if not os.access(folder, os.R_OK | os.X_OK):
            raise PermissionError
        names = _sorted(one.name for one in folder.iterdir() if one.name.endswith(".page"))
    except FileNotFoundError:
        return
    except page.Untrusted as error:
        yield Seen(0, State.UNREADABLE, f"{error}; nothing in it is read")
        return
    except PermissionError:
        yield _of_other_user(0, uid)
        return
    except OSError as error:
        yield Seen(0, State.UNREADABLE, f"{folder} cannot be read: {error}")
        return
    here = set(filter(_is_here, names))
    # After a crash loop there are many others.
    read = here.union([name for name in names if name not in here][:MOST])
    for name in names:
        if name in read:
            yield look(folder / name)
    if len(read) < len(names):
        line = f"{folder} has {len(names)} pages, of which {len(read)} were read"
        yield Seen(0, State.UNREADABLE, line)


def engines_of(
    servers: Collection[int], others: dict[str, tuple[int, int]] | None = None
) -> list[Page]:
    """Return the pages of running engines that are one of ``servers``, or that one started.

    ``others``, kept from call to call, has the pages that are of no such engine. They are not read
    again, as what started a process, and its namespace, are the same as long as its page.
    """
    others = {} if others is None else others
    before = others.copy()
    others.clear()
    found = []
    for path in _own():
        file = _file(path)  # before it is read: it may be replaced in between
        if file is None:
            continue
        if before.get(path.name) == file:
            others[path.name] = file
        elif _is_here(path.name) and (read := look(path)).page is not None:
            if read.state is State.FOREIGN or not _is_of(read.page, servers):
                others[path.name] = file
            elif read.state not in OVER and "engine" in read.page.content:
                found.append(read.page)
    return found


def _file(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from one that took its name, or its inode; None if it is gone."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _is_of(found: Page, servers: Collection[int]) -> bool:
    return found.pid in servers or server_of(found) in servers


def server_of(found: Page) -> int:
    """Return the pid of the process that started a page's process; 0 if its page does not tell."""
    return int((found.content.get("server") or {"pid": 0})["pid"])


def one(pid: int) -> Seen:
    """Return the state of process ``pid``."""
    own = _pages_of(pid, os.getuid())
    here = [seen for seen in own if seen.state is not State.FOREIGN]
    if here:
        return min(here, key=lambda seen: seen.state in OVER)
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        if own:
            return own[0]
        return Seen(pid, State.GONE, f"pid {pid} is not running and has left no status page")
    if owner != os.getuid():
        theirs = [seen for seen in _pages_of(pid, owner) if seen.state is not State.FOREIGN]
        return theirs[0] if theirs else _of_other_user(pid, owner)
    return Seen(
        pid,
        State.UNKNOWN,
        f"pid {pid} has no status page: kvpatch is not on in it, or {STATUS_DIR} is another "
        "folder there",
    )


def _pages_of(pid: int, uid: int) -> list[Seen]:
    """Return what the pages of ``pid`` in a user's folder say: one for each namespace."""
    folder = page.folder_of(uid)
    try:
        page.checked(folder, uid)
        names = _sorted(entry.name for entry in folder.iterdir())
    except page.Untrusted as error:
        return [Seen(pid, State.UNREADABLE, f"{error}; nothing in it is read")]
    except OSError:
        return []
    return [look(folder / name) for name in names if _pid_of(name) == pid]


def _sorted(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (len(name), name))


def _is_here(name: str) -> bool:
    """Return whether a process here has the pid of a page, which may be a later one."""
    return os.access(f"/proc/{_pid_of(name)}", os.F_OK)


def _pid_of(name: str) -> int:
    match = _PAGE.fullmatch(name)
    return int(match[1]) if match else 0


def _of_other_user(pid: int, uid: int) -> Seen:
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"user {uid}"
    who = f"pid {pid} belongs to {name}" if pid else f"{name} has engines, or had some"
    line = f"{who}, whose status pages only they and root can read"
    return Seen(pid, State.OTHER_USER, line)


def look(path: Path) -> Seen:
    """Read one page, and return the state of the process that wrote it."""
    pid = _pid_of(path.name)
    try:
        found = page.read(path)
    except page.Unreadable as error:
        return Seen(pid, State.UNREADABLE, str(error))
    except FileNotFoundError:
        return Seen(pid, State.GONE, f"pid {pid} has just ended")
    except PermissionError:
        return _of_other_user(pid, _owner(path))
    except OSError as error:
        return Seen(pid, State.UNREADABLE, f"{path} is not a status page: {error.strerror}")
    return judge(found, path)


def _owner(path: Path) -> int:
    try:
        return path.parent.lstat().st_uid
    except OSError:
        return os.getuid()


def judge(found: Page, path: Path) -> Seen:
    """Return the state of a process from its page."""
    pid, age = found.pid, found.age
    life = page.life(found)
    if life is Life.FOREIGN:
        line = (
            f"pid {pid} cannot be seen from here: its page, last written {ago(age)}, is of another "
            "pid namespace, as of a container that shares this folder; run kvpatch status there, "
            f"or, if that has ended, rm {shlex.quote(str(path))}"
        )
        return Seen(pid, State.FOREIGN, line, found)
    if life is Life.EXITED and page.ended_in_order(found, path.parent):
        # A server that has lost its engine by an error ends in order too.
        line = f"pid {pid} ended with its server, or before it (its log says), last seen {ago(age)}"
        return Seen(pid, State.ENDED, line, found)
    if life is Life.EXITED:
        how = "exited without cleanup (killed?)"
        if found.content.get("lost"):
            how = "ended because its engine had died (its log says more)"
        line = (
            f"pid {pid} {how}, last seen {ago(age)}; "
            f"rm {shlex.quote(str(path))} removes its status page"
        )
        return Seen(pid, State.KILLED, line, found)
    if not found.content.get("beats"):
        return Seen(pid, State.RUNS, "", found)
    if age > SILENT:
        state = process_state(pid)
        if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            line = f"pid {pid} is stopped (kill -CONT {pid} continues it), last seen {ago(age)}"
            return Seen(pid, State.STOPPED, line, found)
        line = (
            f"pid {pid} is silent for {age:.0f} s (process state {state}): blocked in a call, or "
            f"the machine is overloaded; py-spy dump --pid {pid} shows where"
        )
        return Seen(pid, State.SILENT, line, found)
    engine = found.content.get("engine") or {}
    requests = engine.get("requests") or {"running": 0, "waiting": 0}
    if phase := _PHASES.get(engine.get("phase", "")):
        return Seen(pid, phase, suspended_line(pid, phase, engine), found)
    since, waits = engine.get("since_step", 0.0), engine.get("waits", 0.0)
    wait = bool(requests["waiting"] and not requests["running"] and waits > STUCK)
    # An engine whose requests wait for memory makes steps all the time, in which nothing runs.
    if since > STUCK and (requests["running"] or wait):
        what = (
            f"{requests['waiting']} requests wait"
            if wait
            else f"{requests['running']} requests run"
        )
        line = (
            f"pid {pid} hangs: {what} and no step has ended for {waits if wait else since:.0f} s; "
            f"py-spy dump --pid {pid} shows where"
        )
        return Seen(pid, State.STUCK, line, found)
    if wait:
        return Seen(pid, State.WAITS, waits_line(pid, engine), found)
    return Seen(pid, State.RUNS, "", found)


def suspended_line(pid: int, state: State, engine: dict[str, Any]) -> str:
    """Return what an engine does that was told to suspend or to resume, and who waits for it."""
    requests = engine.get("requests") or {}
    many = requests.get("waiting", 0) + requests.get("running", 0)
    pool = engine.get("pool") or str(pid)
    line = f"pid {pid} ({pool}) is {state.value}"
    if many:
        line += f", and {many} request{' waits' if many == 1 else 's wait'} for it"
    if state is State.RESUMING:
        return line
    what = "gives it its memory back" if state is State.SUSPENDED else "gives that up"
    return f"{line}; kvpatch resume {shlex.quote(pool)} {what}"


FREE = "free memory on the device (kvpatch list; kvpatch suspend NAME, or kvpatch balance)"


def waits_line(pid: int, engine: dict[str, Any]) -> str:
    """Return what an engine waits for, since when, and what to do."""
    line = (
        f"pid {pid} waits for memory: {engine['requests']['waiting']} requests wait, none runs and "
        f"nothing has moved for {engine['waits']:.0f} s"
    )
    may_have_more = True
    if device := engine.get("device"):
        mapped, limit = (
            device[name] * device["page_bytes"] for name in ("mapped_pages", "total_pages")
        )
        line += f", with {readable(mapped)} mapped of {readable(limit)} at most"
        # An engine's last page may be less than whole.
        may_have_more = engine.get("most_bytes", math.inf) - limit >= device["page_bytes"]
    if not may_have_more:
        return f"{line}, which is all it started with; {FREE}, or end requests"
    pool = shlex.quote(engine.get("pool") or "NAME")
    return (
        f"{line}; raise its limit (kvpatch limit {pool} SIZE) up to what it started with, {FREE}, "
        "or end the requests: one may need more than the limit"
    )


def process_state(pid: int) -> str:
    """Return psutil's status of ``pid``; empty if it does not exist."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""


def ago(seconds: float) -> str:
    """Return an age in words."""
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.0f} h ago"
