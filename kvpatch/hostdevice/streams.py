"""Streams and events for copies: asynchronous and ordered, as on a GPU.

The compute stream of a CPU engine is the calling thread itself: what it computed
before a submit is complete when the copy runs. On a GPU the copy stream ensures this
order by waiting for the compute stream.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from kvpatch.hostdevice.ledger import copy_permit

_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


class Event:
    """A point in a stream that others can wait for."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None
        self.time = 0.0

    def record(self, error: BaseException | None = None) -> None:
        """Mark the point as reached, by a failed copy when ``error`` is given."""
        self.error = error
        self.time = time.monotonic()
        self._done.set()

    def query(self) -> bool:
        """Whether the point was reached."""
        return self._done.is_set()

    def synchronize(self) -> None:
        """Wait for the point."""
        self._done.wait()


class Stream:
    """Runs copies one after another on its own thread."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], tuple[Event, ...], Event] | None]
        self._queue = queue.SimpleQueue()
        self._last: Event | None = None
        self._thread = threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)
        _streams.add(self)

    def submit(self, copy: Callable[[], None], after: Iterable[Event] = ()) -> Event:
        """Queue ``copy`` behind everything submitted before and behind ``after``.

        Returns immediately with the event that is recorded when the copy has run.
        """
        event = Event()
        self._last = event
        self._queue.put((copy, tuple(after), event))
        return event

    def synchronize(self) -> None:
        """Wait for everything submitted so far."""
        if self._last is not None:
            self._last.synchronize()

    def close(self) -> None:
        """Finish the submitted copies and end the thread."""
        self._queue.put(None)
        self._thread.join()


def _run(
    queued: queue.SimpleQueue[tuple[Callable[[], None], tuple[Event, ...], Event] | None],
) -> None:
    """Run what is queued until the stream ends; its thread does not keep the stream alive."""
    while (item := queued.get()) is not None:
        copy, after, event = item
        error: BaseException | None = None
        try:
            for earlier in after:
                earlier.synchronize()
            with copy_permit():
                copy()
        except BaseException as failure:
            error = failure
        event.record(error)
        del item, copy, after, event


def synchronize() -> None:
    """Wait for every stream of this process: the device-wide synchronization."""
    for stream in list(_streams):
        stream.synchronize()
