"""Streams and events for copies: asynchronous and ordered, as on a GPU.

The compute stream of a CPU engine is the calling thread itself: what it computed
before a submit is complete when the copy runs. On a GPU the copy stream ensures this
order by waiting for the compute stream.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from kvpatch.hostdevice.ledger import copy_permit

_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # also of streams that are gone
_ending = threading.Event()
_LAST_COPY = 5.0  # seconds that the end of a process waits for a copy in flight


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
        _threads.add(self._thread)
        weakref.finalize(self, self._queue.put, None)
        _streams.add(self)

    def submit(self, copy: Callable[[], None], after: Iterable[Event] = ()) -> Event:
        """Queue ``copy`` behind everything before and ``after``; return the event of its end."""
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
                if not _ending.is_set():
                    copy()
        except BaseException as failure:
            error = failure
        event.record(error)
        del item, copy, after, event


def synchronize() -> None:
    """Wait for every stream of this process: the device-wide synchronization."""
    for stream in list(_streams):
        stream.synchronize()


@atexit.register
def _end() -> None:
    """Let copies in flight end: a daemon thread that leaves libtorch after that is a SIGABRT."""
    _ending.set()
    for stream in list(_streams):
        stream._queue.put(None)  # also a thread without work has to end
    until = time.monotonic() + _LAST_COPY
    for thread in list(_threads):
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
