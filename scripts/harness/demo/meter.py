"""A server's own counters, and the device memory that it has mapped."""

from __future__ import annotations

import threading
import time
from dataclasses import astuple, dataclass, field
from pathlib import Path

from harness.serve import Metrics
from kvpatch.hostdevice import ledger

DEVICE_PAGE = 2 << 20
_MEMFD = "memfd:kvpatch-host-device"


@dataclass(frozen=True)
class Counters:
    """vLLM's own counters."""

    computed: int = 0
    from_cache: int = 0
    from_tier: int = 0
    stored: int = 0
    loaded: int = 0

    def since(self, earlier: Counters) -> Counters:
        """Return what was counted after ``earlier`` was read."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return Counters(*(now - before for now, before in pairs))


def counters(metrics: Metrics) -> Counters:
    """Return the counters of one reading; those a server does not have are zero."""

    def tokens(source: str) -> int:
        return int(metrics.total("vllm:prompt_tokens_by_source_total", source=source))

    return Counters(
        computed=tokens("local_compute"),
        from_cache=tokens("local_cache_hit"),
        from_tier=tokens("external_kv_transfer"),
        stored=int(metrics.total("vllm:kv_offload_store_bytes_total")),
        loaded=int(metrics.total("vllm:kv_offload_load_bytes_total")),
    )


@dataclass(frozen=True)
class Sample:
    """One sample of the device: bytes in its ledger, and bytes that the OS holds for it."""

    seconds: float
    mapped: int
    resident: int


@dataclass
class MemoryMeter:
    """Watches the host device's memory from outside the engine, on a thread.

    The mapped bytes are the device's ledger. The resident ones are the pages of the
    engine's memory file: they show whether memory went back to the operating system.
    """

    interval: float = 0.05
    samples: list[Sample] = field(default_factory=list)
    phases: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begun = time.monotonic()
        self._stop = threading.Event()
        self._files: dict[int, Path] = {}
        self._thread = threading.Thread(target=self._watch, name="memory-meter", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._begun = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and stop."""
        if self._thread.ident is not None and not self._stop.is_set():
            self._stop.set()
            self._thread.join()

    def phase(self, name: str) -> None:
        """Note that a phase begins."""
        self.phases.append((time.monotonic() - self._begun, name))

    def look(self) -> Sample:
        """Take one sample."""
        usage = ledger.usage()
        resident = sum(self._resident(pid) for pid in usage)
        sample = Sample(time.monotonic() - self._begun, sum(usage.values()), resident)
        self.samples.append(sample)
        return sample

    @property
    def peak(self) -> int:
        """The most bytes mapped at once."""
        return max((sample.mapped for sample in self.samples), default=0)

    def wait_until_at_most(self, size: int, limit: float) -> Sample:
        """Return the first sample of at most ``size`` mapped bytes, or the last in ``limit``."""
        deadline = time.monotonic() + limit
        while (sample := self.look()).mapped > size and time.monotonic() < deadline:
            self._stop.wait(self.interval)
        return sample

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            self.look()
        self.look()

    def _resident(self, pid: int) -> int:
        try:
            if pid not in self._files:
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    if _MEMFD in str(file.readlink()):
                        self._files[pid] = file
            return self._files[pid].stat().st_blocks * 512 if pid in self._files else 0
        except OSError:  # the process has ended, or has just closed a file
            self._files.pop(pid, None)
            return 0
