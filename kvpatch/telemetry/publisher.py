"""Keeping a process's page up to date, without delaying its own thread.

An engine's page is written twice per second by a separate thread: a busy engine is not
slowed (a write takes about 0.1 ms), an idle one is still visible as running, and a stuck
one as stuck, which a write per step could not show. Pages that do not change, those of the
frontend and the workers, are written once.

No error of publishing ends a process: it is logged, and the process goes on without a page.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

from kvpatch.environ import STATUS_DIR
from kvpatch.logs import log
from kvpatch.process import start_ticks
from kvpatch.telemetry import status_page as page
from kvpatch.telemetry import suspended
from kvpatch.telemetry.fuse import in_words
from kvpatch.version import VERSION

Describe = Callable[[], dict[str, Any]]
DescribeEngine = Callable[[Any], dict[str, Any]]

INTERVAL = 0.5  # seconds between two writes
FORGOTTEN = 3600  # seconds after which the page of an exited process is removed
RATES_OVER = 10.0  # seconds over which an engine's rates are taken

_publisher: Publisher | None = None


class Rates:
    """What an engine stored and loaded per second lately."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, float]]] = deque()

    def of(self, engine: dict[str, Any]) -> dict[str, dict[str, float]]:
        """Return ``rates``, in bytes per second, for an engine's description."""
        now, moved = time.monotonic(), engine.get("bytes")
        if not moved:
            return {}
        self._seen.append((now, moved))
        while now - self._seen[0][0] > RATES_OVER:
            self._seen.popleft()
        since, before = self._seen[0]
        if before.keys() != moved.keys() or any(moved[name] < before[name] for name in moved):
            self._seen.clear()  # another engine of this process
            return {}
        # Over all of the time, so that one transfer just after a start is no high rate.
        seconds = max(now - since, RATES_OVER / 2)
        return {"rates": {name: (moved[name] - before[name]) / seconds for name in moved}}


def server() -> dict[str, Any] | None:
    """Return the process that started this one, as its page says, to end with it; or None."""
    try:
        for found in page.of_process(page.own_folder(), os.getppid()):
            if page.life(found) is page.Life.RUNS:
                return {"pid": found.pid, "started": found.content["started"]}
    except Exception as error:  # a page without it is still one
        log.debug("kvpatch: the server of this process is not known: %r", error)
    return None


class Publisher:
    """Publishes what is described of one process; OSError if the page cannot be created."""

    def __init__(self, describe: Describe) -> None:
        self.pid = os.getpid()
        self._describe = describe
        self._writer = page.Writer(self.pid, VERSION)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Weak, so that an engine that its program deletes is deleted, with its weights.
        self._engine: weakref.ref[Any] | None = None
        self._describe_engine: DescribeEngine | None = None
        self._rates = Rates()
        self._server = server()
        self._lost = False
        # A worker has a page before its engine does.
        self._parent = {"pid": os.getppid(), "started": start_ticks(os.getppid())}
        try:
            self.write()
        except BaseException:
            self._writer.remove()
            raise
        # A finalizer, because vLLM's child processes exit without running atexit.
        util.Finalize(None, self.close, exitpriority=0)

    def write(self) -> None:
        """Publish the current state of the process."""
        engine = None if self._engine is None else self._engine()
        content = self._describe() | {
            "group": os.getpgid(0),
            "server": self._server,
            "parent": self._parent,
            "beats": engine is not None,
            "lost": self._lost,
        }
        if engine is not None and self._describe_engine is not None:
            try:
                described = self._describe_engine(engine) | suspended.of(engine)
                content["engine"] = described | self._rates.of(described)
            except Exception as error:  # or the engine is shutting down
                content["off"] = in_words(error)
        try:
            self._writer.write(content)
        except (TypeError, ValueError) as error:  # it does not fit, for example
            if content.pop("engine", None) is None:
                raise
            self._writer.write(content | {"off": in_words(error)})

    def follow(self, engine: Any, describe: DescribeEngine) -> None:
        """Publish an engine from now on, until it is deleted or the process exits."""
        with self._lock:
            self._engine, self._describe_engine = weakref.ref(engine), describe
            del engine
            self._try_to_write()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvpatch-status", daemon=True)
                thread.start()
                self._thread = thread

    def refresh(self) -> None:
        """Publish the current state, on any thread; an error is logged."""
        with self._lock:
            self._try_to_write()

    def lose(self) -> None:
        """Say that an engine died by itself: without a page it would look stopped in order."""
        with self._lock:
            self._lost = True
            self.write()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            with self._lock:
                self._try_to_write()
                if self._engine is None or self._engine() is None:
                    self._thread = None  # the next engine starts another
                    return

    def _try_to_write(self) -> None:
        try:
            if not self._writer.is_there():
                self._writer = page.Writer(self.pid, VERSION)
            self.write()
        except Exception as error:
            log.debug("kvpatch: the status page was not written: %r", error)

    def close(self) -> None:
        """Remove the page, in the process that created it, unless it is to be seen."""
        if os.getpid() == self.pid:
            self._stop.set()
            if self._lost:
                return
            try:
                self._writer.remove()
            except Exception as error:
                log.debug("kvpatch: the status page was not removed: %r", error)


def process(describe: Describe) -> None:
    """Publish this process; if that fails, log a warning and continue."""
    global _publisher
    if _publisher is not None and _publisher.pid == os.getpid():
        return
    try:
        sweep(page.own_folder())
    except Exception as error:
        log.debug("kvpatch: old status pages were not removed: %r", error)
    try:
        _publisher = Publisher(describe)
    except Exception as error:
        _cannot_show(error)


def engine(core: Any, describe: DescribeEngine) -> None:
    """Publish this process together with the state of its engine, while that exists."""
    if _publisher is not None and _publisher.pid == os.getpid():
        try:
            _publisher.follow(core, describe)
        except Exception as error:
            _cannot_show(error)


def refresh() -> None:
    """Publish what this process is now: who was told that a verb has ended reads the same."""
    if _publisher is not None and _publisher.pid == os.getpid():
        _publisher.refresh()


def engine_died() -> None:
    """Say that an engine of this process has died, which nobody had asked to stop."""
    if _publisher is not None and _publisher.pid == os.getpid():
        try:
            _publisher.lose()
        except Exception as error:
            log.debug("kvpatch: that the engine died is not shown: %r", error)


def _cannot_show(error: Exception) -> None:
    if isinstance(error, OSError):
        remedy = f"make room in {page.base()}, or set {STATUS_DIR} to another folder"
    else:
        remedy = "report it with your versions"
    log.warning(
        "kvpatch: kvpatch status cannot show this process, which goes on without it, because its "
        "page cannot be written (%s); %s",
        in_words(error),
        remedy,
    )


def sweep(folder: Path) -> None:
    """Remove pages of processes that exited long ago, and files of refusals half written.

    A server's stays as long as one of what it started: that would look as if it ended in order.
    """
    exited: dict[Path, page.Page] = {}
    needed: set[int] = set()
    for path in folder.glob("*.page"):
        try:
            found = page.read(path)
            if page.life(found) is page.Life.EXITED and found.age > FORGOTTEN:
                exited[path] = found
            else:
                needed.add(_server_of(found))
        except Exception as error:
            log.debug("kvpatch: %s was left as it is: %r", path, error)
    while kept := [path for path, found in exited.items() if found.pid in needed]:
        needed.update(_server_of(exited.pop(path)) for path in kept)
    for path in exited:
        try:
            path.unlink(missing_ok=True)
        except Exception as error:
            log.debug("kvpatch: %s was left as it is: %r", path, error)
    for path in folder.glob("refusals.*"):
        try:
            if time.time() - path.lstat().st_mtime > FORGOTTEN:
                path.unlink(missing_ok=True)
        except OSError:
            continue


def _server_of(found: page.Page) -> int:
    """Return the pid of what started a page's process; 0 where that is not known."""
    started_by = found.content.get("server") or found.content.get("parent")
    return int(started_by["pid"]) if started_by else 0
