"""Where an engine is killed: it stops at the n-th pass through a point, until it is killed.

A process that reaches the point writes its pid into a file and stops itself (SIGSTOP), with all
its threads. Whoever waits for the file kills the process, or another one of the same engine, and
lets this one go on.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Copies of the worker, files of the engine.
COPIES = ("store", "load")
FILES = ("promotion", "tier write", "tier rename")
POINTS = (*COPIES, *FILES)
# Where an engine is on its way to a suspension and back, as its own thread gets there.
PHASES = ("pausing", "storing", "releasing", "suspended", "resuming")
# What a resumption does, each before it is done: the limit is written for all to see, the engine
# keeps to it, requests may run, and the last step of it has said so.
BACK = ("limit written", "limit kept", "requests run", "runs")
_OWN_THREAD = "MainThread"
_COPYING_THREADS = "kvpatch-copies"
_TIER_THREADS = "vllm_kv_py_fs"


class Point:
    """Stops this process at one pass through a point.

    Args:
        thread: how the names of the threads begin that pass it.
        nth: the pass, from 1 on.
        reached: the file that says so; passes count from when there is ``armed`` beside it.
    """

    def __init__(self, thread: str, nth: int, reached: Path) -> None:
        self._thread, self._nth, self._reached = thread, nth, reached
        self._armed = reached.with_name("armed")
        self._lock = threading.Lock()
        self._passed = 0

    def due(self) -> bool:
        """Count a pass; whether it is the one to stop at."""
        if not threading.current_thread().name.startswith(self._thread):
            return False
        if not self._armed.exists():
            return False
        with self._lock:
            self._passed += 1
            return self._passed == self._nth

    def stop(self) -> None:
        """Stop this process until somebody lets it go on."""
        partial = self._reached.with_suffix(f".{os.getpid()}")
        partial.write_text(str(os.getpid()))
        partial.rename(self._reached)
        os.kill(os.getpid(), signal.SIGSTOP)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with this point before each call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.due():
                self.stop()
            return function(*args, **kwargs)

        return call

    def half_written(self, writev: Callable[..., int]) -> Callable[..., int]:
        """Return ``os.writev`` with this point in the middle of what it writes."""

        def write(file: int, parts: list[Any]) -> int:
            if not self.due():
                return writev(file, parts)
            first = memoryview(parts[0])
            middle = len(first) // 2
            written = writev(file, [first[:middle]])
            self.stop()
            return written + writev(file, [first[middle:], *parts[1:]])

        return write


def install(name: str, nth: int, reached: Path) -> None:
    """Put the point ``name`` into this process and those that it forks."""
    if name in PHASES:
        _install_phase(name, Point(_OWN_THREAD, nth, reached))
        return
    if name in BACK:
        _install_way_back(name, Point(_OWN_THREAD, nth, reached))
        return
    if name in COPIES:
        _install_copy(name, Point(_COPYING_THREADS, nth, reached))
        return
    point = Point(_TIER_THREADS, nth, reached)
    if name == "promotion":
        os.readv = point.before(os.readv)
    elif name == "tier write":
        os.writev = point.half_written(os.writev)
    else:
        os.replace, os.rename = point.before(os.replace), point.before(os.rename)


def _install_copy(name: str, point: Point) -> None:
    """Put a point before each copy of a block to the CPU tier, or from it.

    The tier is what the worker has registered; both ways are on threads of one name.
    """
    from kvpatch.hostdevice import copies

    def of_tier(address: int) -> bool:
        registered = list(copies.HostRegistration.ranges.items())
        return any(base <= address < base + size for base, size in registered)

    stopping = point.before(ctypes.memmove)

    def memmove(destination: int, source: int, size: int) -> int:
        copy = stopping if of_tier(destination if name == "store" else source) else ctypes.memmove
        return int(copy(destination, source, size))

    copies.ctypes = SimpleNamespace(**vars(ctypes) | {"memmove": memmove})  # type: ignore


def _install_way_back(name: str, point: Point) -> None:
    """Put a point before a part of a resumption; the same functions suspend, which is no pass."""
    from kvpatch.patches.suspend.hold import Hold
    from kvpatch.patches.suspend.suspension import Phase, Suspension
    from kvpatch.upstream import kvcached_api

    back: list[bool] = []  # whether the engine is on its way back
    take_back, go_to = Suspension._take_back, Suspension._go_to

    def taking_back(self: Any) -> None:
        back.append(True)
        take_back(self)

    def before(function: Callable[..., Any], wanted: bool) -> Callable[..., Any]:
        stopping = point.before(function)

        def call(*args: Any) -> Any:
            return (stopping if back and wanted else function)(*args)

        return call

    def going_to(self: Any, phase: Any, error: str = "") -> None:
        go_to(self, phase, error)
        if phase is Phase.RUNS and back and name == "runs" and point.due():
            point.stop()

    Suspension._take_back = taking_back  # type: ignore[method-assign]
    Suspension._go_to = going_to  # type: ignore[method-assign]
    api: Any = kvcached_api
    api.write_limit = before(api.write_limit, name == "limit written")
    api.is_applied = before(api.is_applied, name == "limit kept")
    Hold.set = before(Hold.set, name == "requests run")  # type: ignore[method-assign]


def _install_phase(name: str, point: Point) -> None:
    """Put a point where a suspension gets into a phase."""
    from kvpatch.patches.suspend.suspension import Suspension

    go_to = Suspension._go_to

    def stopping(self: Any, phase: Any, error: str = "") -> None:
        go_to(self, phase, error)
        if phase.value == name and point.due():
            point.stop()

    Suspension._go_to = stopping  # type: ignore[method-assign]
