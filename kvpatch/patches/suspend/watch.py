"""What makes an idle engine look: a limit that was set in /dev/shm, and time that has passed.

An engine without requests waits for its clients, and reads its limit in its next allocation.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from kvpatch.logs import log
from kvpatch.patches.suspend import server
from kvpatch.patches.suspend.giving import Giving
from kvpatch.upstream import kvcached_api, kvcached_limits

EVERY = 0.25  # seconds; kvcached's own thread reads the limit ten times a second


class Look(server.Handed):
    """Tells the engine's thread that there is something to see, or that the engine rests."""

    taken_by = Giving

    def __init__(self, rests: bool) -> None:
        self.rests = rests
        self.taken = threading.Event()

    def take(self, giving: Giving) -> None:
        """Begin what is due; on the engine's thread."""
        try:
            if self.rests:
                giving.rest()
            giving.look()
        except Exception as error:
            if kvcached_limits.must_end(error):
                raise
            log.exception("kvpatch: an idle engine could not look at its limit")
        self.taken.set()


class Watch:
    """Watches an engine from a thread until it is gone; it rests after ``idle`` seconds."""

    def __init__(self, engine: Any, giving: Giving, idle: float | None) -> None:
        self._engine = weakref.ref(engine)
        self._giving = weakref.ref(giving)
        self._idle = idle
        giving.busy_at = time.monotonic()
        self._look: Look | None = None
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="kvpatch-watch", daemon=True).start()

    def close(self) -> None:
        """Watch no longer."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            engine, giving = self._engine(), self._giving()
            if engine is None or giving is None:
                return
            try:
                self.look(engine, giving)
            except Exception as error:  # or the engine is shutting down
                log.debug("kvpatch: an engine was not watched: %r", error)

    def look(self, engine: Any, giving: Giving) -> None:
        """Send the engine's thread a ``Look`` if there is something to see."""
        if self._look is not None and not self._look.taken.is_set():
            return
        now = time.monotonic()
        # Requests that come and go between two looks are seen in the engine's steps.
        if any(engine.scheduler.get_request_counts()):
            giving.busy_at = now
        rests = self._idle is not None and now - giving.busy_at >= self._idle and giving.can_rest
        if rests or giving.lowers or kvcached_api.is_above_limit(giving.manager):
            self._look = Look(rests)
            server.hand_over(engine, self._look)
