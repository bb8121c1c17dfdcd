"""Keeping a process's page up to date, without its own thread noticing.

An engine's page is written twice a second by a thread of its own: an engine that is
busy is not slowed (a write is some 0.1 ms), one that is idle is still seen to live,
and one that is stuck is seen to be stuck, which a write at every step could not tell.
Processes that change nothing, the frontend and the workers, write theirs once.
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
FORGOTTEN = 3600  # seconds after which a dead process's page is swept up

_publisher: Publisher | None = None


class Publisher:
    """Publishes one process.

    Args:
        describe: returns the facts of the process.

    Raises:
        OSError: there is no place for the page.
    """

    def __init__(self, describe: Describe) -> None:
        self.pid = os.getpid()
        self._describe = describe
        self._writer = page.Writer(self.pid, VERSION)
        self._stop = threading.Event()
        self._engine: Describe | None = None
        # A finalizer, because vLLM's children leave without running atexit.
        util.Finalize(None, self.close, exitpriority=0)
        self.write()

    def write(self) -> None:
        """Publish the process as it is now."""
        content = self._describe() | {
            "group": os.getpgid(0),
            "beats": self._engine is not None,
            "refusals": refusals.recent(),
        }
        if self._engine is not None:
            content["engine"] = self._engine()
        self._writer.write(content)

    def follow(self, engine: Describe) -> None:
        """Publish an engine from now on, until the process ends."""
        self._engine = engine
        self.write()
        threading.Thread(target=self._run, name="kvpatch-status", daemon=True).start()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            try:
                self.write()
            except Exception as error:  # an engine that is being taken down, or a full page
                log.debug("kvpatch: the status page was not written: %r", error)

    def close(self) -> None:
        """Take the page away, in the process that made it."""
        self._stop.set()
        if os.getpid() == self.pid:
            self._writer.remove()


def process(describe: Describe) -> None:
    """Publish this process; a process that cannot is served all the same, and says so."""
    global _publisher
    if _publisher is not None and _publisher.pid == os.getpid():
        return
    try:
        sweep(page.own_folder())
        _publisher = Publisher(describe)
    except OSError as error:
        log.warning("kvpatch: kvpatch status cannot show this process: %s", error)


def engine(describe: Describe) -> None:
    """Go on publishing this process with what its engine does."""
    if _publisher is not None and _publisher.pid == os.getpid():
        _publisher.follow(describe)


def sweep(folder: Path) -> None:
    """Remove pages of processes that have been gone for long."""
    for path in folder.glob("*.page"):
        try:
            found = page.read(path)
        except (OSError, page.Unreadable):
            continue
        if not page.lives(found) and found.age > FORGOTTEN:
            path.unlink(missing_ok=True)
