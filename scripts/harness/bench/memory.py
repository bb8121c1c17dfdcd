"""The device's memory over time, by server, read from outside the engines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from harness.serve import Server
from kvpatch.hostdevice import ledger

INTERVAL = 0.1


class MappedMemory:
    """Samples the bytes that servers have mapped of one device, on a thread.

    Use as a context manager around what is measured.

    Args:
        folder: of the device's ledger.
        servers: by the name under which each is to appear.
    """

    def __init__(self, folder: str, servers: dict[str, Server]) -> None:
        self._folder = folder
        self._pids = {name: set(server.processes()) for name, server in servers.items()}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mapped-memory", daemon=True)
        self.samples: list[tuple[float, dict[str, int]]] = []
        self.phases: list[tuple[float, str]] = []

    def __enter__(self) -> MappedMemory:
        # The ledger is found by this; one device is measured at a time.
        os.environ[ledger.FOLDER] = self._folder
        self._begun = time.monotonic()
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.look()

    def phase(self, name: str) -> None:
        """Remember that something begins now."""
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
        """Return the samples, thinned to about so many, as a result file holds them."""
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


def settled(read: Callable[[], Any], limit: float = 5.0, interval: float = 0.2) -> Any:
    """Return what ``read`` returns once it has returned the same twice, or after ``limit``."""
    deadline = time.monotonic() + limit
    last = read()
    while time.monotonic() < deadline:
        time.sleep(interval)
        now = read()
        if now == last:
            break
        last = now
    return last


def cpu_seconds(server: Server) -> float:
    """Return the processor time that a server's processes have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in _processes(server))


def host_bytes(server: Server) -> int:
    """Return the memory of a server's processes, shared pages counted once."""
    return sum(process.memory_full_info().pss for process in _processes(server))


def _processes(server: Server) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in server.processes()]
