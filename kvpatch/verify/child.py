"""The command as a child process, from its start until nothing of it is left."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from kvpatch import refusal

STOP_SECONDS = 60.0
_PR_SET_CHILD_SUBREAPER = 36
_VIOLATION = re.compile(r"kvpatch KVPATCH_DEBUG: .*")


class Ended(RuntimeError):
    """The command ended under load, or does not answer; its message says why."""


class Unfinished(RuntimeError):
    """A run cannot go on, for a reason that says nothing about the bytes of the command."""


class Child:
    """One command, started by its ``with`` block and ended with all its processes after it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command, self._environment = list(command), dict(environment)
        self.log_path = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Child:
        adopt_orphans()
        with self.log_path.open("wb") as log:
            try:
                # In a session of its own, in which all of its processes can be found.
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise Unfinished(
                    f"{self._command[0]} cannot be started: {error.strerror}"
                ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            with suppress(ProcessLookupError):  # as Ctrl-C in a terminal
                os.killpg(self._process.pid, signal.SIGINT)
        deadline = time.monotonic() + STOP_SECONDS
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self._process.wait()

    @property
    def log(self) -> str:
        """Everything that it printed so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def violation(self) -> str:
        """What the audit in a worker found wrong first, in its words; empty for nothing."""
        found = _VIOLATION.search(self.log)
        return found[0] if found else ""

    def check(self) -> None:
        """Raise Ended unless it runs."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise Ended(f"the command ended with status {status}: {self.reason()}")

    def reason(self) -> str:
        """Return the line of its log that best explains why it ended."""
        return reason([line for line in self.log.splitlines() if line.strip()])

    def processes(self) -> list[psutil.Process]:
        """Return the processes of its session that run; those that have ended are reaped."""
        assert self._process is not None
        self._process.poll()
        return session(self._process.pid)


def adopt_orphans() -> None:
    """Let this process reap orphaned grandchildren, as a container without an init would not."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def session(leader: int) -> list[psutil.Process]:
    """Return a session's processes; what has ended stays until its last thread, and is reaped."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it may end meanwhile
            if os.getsid(process.pid) != leader:
                continue
            ours = process.pid != leader and process.ppid() == os.getpid()
            if not (ours and os.waitpid(process.pid, os.WNOHANG)[0] == process.pid):
                found.append(process)
    return found


def reason(lines: Sequence[str]) -> str:
    """Return the line of a log that best explains why a server ended."""
    for line in reversed(lines):
        for opening in (refusal.Refusal.opening, refusal.Halted.opening):
            if opening in line:
                return line[line.index(opening) :]
    for line in reversed(lines):
        if found := re.search(r"\b(?:\w+\.)*\w*(?:Error|Exception|Killed)\b: .+", line):
            return found[0]
    return lines[-1] if lines else "it printed nothing"


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
