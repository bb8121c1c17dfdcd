"""Keeping a process's page up to date, without delaying its own thread.

An engine's page is written twice per second by a separate thread: a busy engine is not
slowed (a write takes about 0.1 ms), an idle one is still visible as running, and a stuck
one as stuck, which a write per step could not show. Pages that do not change, those of the
frontend and the workers, are written once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

from kvpatch.logs import log
from kvpatch.telemetry import refusals
from kvpatch.telemetry import status_page as page
from kvpatch.version import VERSION

Describe = Callable[[], dict[str, Any]]

INTERVAL = 0.5  # seconds between two writes
FORGOTTEN = 3600  # seconds after which the page of an exited process is removed

_publisher: Publisher | None = None


class Publisher:
    """Publishes one process.

    Args:
        describe: returns the facts of the process.

    Raises:
        OSError: the page cannot be created.
    """

    def __init__(self, describe: Describe) -> None:
        self.pid = os.getpid()
        self._describe = describe
        self._writer = page.Writer(self.pid, VERSION)
        self._stop = threading.Event()
        self._engine: Describe | None = None
        # A finalizer, because vLLM's child processes exit without running atexit.
        util.Finalize(None, self.close, exitpriority=0)
        self.write()

    def write(self) -> None:
        """Publish the current state of the process."""
        content = self._describe() | {
            "group": os.getpgid(0),
            "beats": self._engine is not None,
            "refusals": refusals.recent(),
        }
        if self._engine is not None:
            content["engine"] = self._engine()
        self._writer.write(content)

    def follow(self, engine: Describe) -> None:
        """Publish an engine from now on, until the process exits."""
        self._engine = engine
        self.write()
        threading.Thread(target=self._run, name="kvpatch-status", daemon=True).start()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            try:
                self.write()
            except Exception as error:  # the engine is shutting down, or the page is full
                log.debug("kvpatch: the status page was not written: %r", error)

    def close(self) -> None:
        """Remove the page, in the process that created it."""
        self._stop.set()
        if os.getpid() == self.pid:
            self._writer.remove()


def process(describe: Describe) -> None:
    """Publish this process; if that fails, log a warning and continue."""
    global _publisher
    if _publisher is not None and _publisher.pid == os.getpid():
        return
    try:
        sweep(page.own_folder())
        _publisher = Publisher(describe)
    except OSError as error:
        log.warning("kvpatch: kvpatch status cannot show this process: %s", error)


def engine(describe: Describe) -> None:
    """Publish this process together with the state of its engine."""
    if _publisher is not None and _publisher.pid == os.getpid():
        _publisher.follow(describe)


def sweep(folder: Path) -> None:
    """Remove pages of processes that exited long ago."""
    for path in folder.glob("*.page"):
        try:
            found = page.read(path)
        except (OSError, page.Unreadable):
            continue
        if not page.lives(found) and found.age > FORGOTTEN:
            path.unlink(missing_ok=True)
