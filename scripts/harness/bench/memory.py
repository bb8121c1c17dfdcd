"""The device's memory over time, by server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from harness.serve import Server
from kvpatch.environ import HOST_DEVICE_DIR
from kvpatch.hostdevice import ledger

INTERVAL = 0.1
T = TypeVar("T")


class MappedMemory:
    """Samples the bytes that servers have mapped of one device, on a thread.

    Use as a context manager around what is measured.

    Args:
        folder: of the device's ledger.
        servers: by the name of each in the samples.
    """

    def __init__(self, folder: str, servers: dict[str, Server]) -> None:
        self._folder = folder
        self._pids = {
            name: {one.pid for one in server.processes()} for name, server in servers.items()
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mapped-memory", daemon=True)
        self.samples: list[tuple[float, dict[str, int]]] = []
        self.phases: list[tuple[float, str]] = []

    def __enter__(self) -> MappedMemory:
        # The ledger is found by this; one device is measured at a time.
        os.environ[HOST_DEVICE_DIR.name] = self._folder
        self._begun = time.monotonic()
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.look()

    def phase(self, name: str) -> None:
        """Note that a phase begins."""
        self.phases.append((round(time.monotonic() - self._begun, 2), name))

    def look(self) -> dict[str, int]:
        """Take one sample."""
        usage = ledger.usage()
        now = {
            name: sum(size for pid, size in usage.items() if pid in pids)
            for name, pids in self._pids.items()
        }
        self.samples.append((time.monotonic() - self._begun, now))
        return now

    def within(self, phase: str) -> list[dict[str, int]]:
        """Return the samples of a phase."""
        names = [name for _, name in self.phases]
        at = names.index(phase)
        begin = self.phases[at][0]
        end = self.phases[at + 1][0] if at + 1 < len(self.phases) else float("inf")
        return [sample for seconds, sample in self.samples if begin <= seconds < end]

    def timeline(self, points: int = 120) -> dict[str, Any]:
        """Return about ``points`` of the samples, in the form of a result file."""
        step = max(1, len(self.samples) // points)
        kept = self.samples[::step]
        return {
            "seconds": [round(seconds, 2) for seconds, _ in kept],
            "mapped": {name: [sample[name] for _, sample in kept] for name in self._pids},
            "phases": [list(phase) for phase in self.phases],
        }

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.look()


def settled(read: Callable[[], T]) -> T:
    """Return the value of ``read`` once it is the same twice, or after five seconds."""
    deadline = time.monotonic() + 5
    last = read()
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = read()
        if now == last:
            break
        last = now
    return last
