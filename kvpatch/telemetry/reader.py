"""Finding pages, and deriving the state of a process from its page."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil

from kvpatch.environ import STATUS_DIR
from kvpatch.telemetry import status_page as page
from kvpatch.telemetry.status_page import Page

SILENT = 5.0  # seconds: ten intervals of the publishing thread
STUCK = 30.0  # seconds without a step while requests run


class State(str, Enum):
    """The state of a process."""

    RUNS = "runs"
    STUCK = "stuck"
    STOPPED = "stopped"
    SILENT = "silent"
    GONE = "gone"
    OTHER_USER = "other-user"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Seen:
    """One process, as far as this user can see it.

    Attributes:
        pid: the process; 0 if only the folder of another user is known.
        state: its state.
        line: the state in one line; empty for a process that runs.
        page: its last published page, if that can be read.
    """

    pid: int
    state: State
    line: str = ""
    page: Page | None = None


def all_of(everyone: bool) -> list[Seen]:
    """Return every process that publishes on this machine.

    Args:
        everyone: also include other users; only root can read their pages.
    """
    folders = [page.folder_of(os.getuid())]
    if everyone:
        folders += sorted(set(page.base().glob("kvpatch-status-*")) - set(folders))
    seen: list[Seen] = []
    for folder in folders:
        try:
            paths = sorted(folder.glob("*.page"), key=lambda path: (len(path.name), path.name))
            if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
                raise PermissionError
        except PermissionError:
            seen.append(_of_other_user(0, folder.stat().st_uid))
            continue
        seen += [look(path) for path in paths]
    return seen


def one(pid: int) -> Seen:
    """Return the state of process ``pid``."""
    path = page.folder_of(os.getuid()) / f"{pid}.page"
    if path.exists():
        return look(path)
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return Seen(pid, State.GONE, f"pid {pid} is not running and has left no status page")
    if owner != os.getuid():
        theirs = page.folder_of(owner) / f"{pid}.page"
        try:
            if theirs.exists():
                return look(theirs)
        except PermissionError:
            pass
        return _of_other_user(pid, owner)
    return Seen(
        pid,
        State.UNKNOWN,
        f"pid {pid} has no status page: kvpatch is not on in it, or {STATUS_DIR} is another "
        "folder there",
    )


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
    pid = int(path.stem) if path.stem.isdigit() else 0
    try:
        found = page.read(path)
    except page.Unreadable as error:
        return Seen(pid, State.UNREADABLE, str(error))
    except PermissionError:
        return _of_other_user(pid, path.parent.stat().st_uid)
    except OSError:
        return Seen(pid, State.GONE, f"pid {pid} has just ended")
    return judge(found, path)


def judge(found: Page, path: Path) -> Seen:
    """Return the state of a process from its page."""
    pid, age = found.pid, found.age
    if not page.lives(found):
        line = (
            f"pid {pid} exited without cleanup (killed?), last seen {ago(age)}; "
            f"rm {path} removes its status page"
        )
        return Seen(pid, State.GONE, line, found)
    if not found.content["beats"]:
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
    engine = found.content.get("engine")
    if engine and engine["requests"]["running"] and engine["since_step"] > STUCK:
        line = (
            f"pid {pid} hangs: {engine['requests']['running']} requests run and no step has ended "
            f"for {engine['since_step']:.0f} s; py-spy dump --pid {pid} shows where"
        )
        return Seen(pid, State.STUCK, line, found)
    return Seen(pid, State.RUNS, "", found)


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
