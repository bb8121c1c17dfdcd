"""Reading what a server did: its own counters, and the device memory it has mapped."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvpatch.hostdevice import ledger

DEVICE_PAGE = 2 << 20
_MEMFD = "memfd:kvpatch-host-device"


@dataclass(frozen=True)
class Counters:
    """vLLM's own counters, from its ``/metrics``; sums over labels."""

    computed: int = 0
    from_cache: int = 0
    from_tier: int = 0
    stored: int = 0
    loaded: int = 0

    def since(self, earlier: Counters) -> Counters:
        """Return what was counted after ``earlier`` was read."""
        return Counters(
            self.computed - earlier.computed,
            self.from_cache - earlier.from_cache,
            self.from_tier - earlier.from_tier,
            self.stored - earlier.stored,
            self.loaded - earlier.loaded,
        )


def read_counters(client: httpx.Client) -> Counters:
    """Return the counters now; those a server does not have are zero."""
    return parse_counters(client.get("/metrics").text)


def sums(exposition: str) -> dict[str, float]:
    """Return each series of a Prometheus text exposition, summed over its labels.

    Two are told apart by a label: prompt tokens by ``source``, whose name is then the
    source, and ``vllm:kvpatch_offload_bytes_total`` by ``outcome``.
    """
    found: dict[str, float] = {}
    for line in exposition.splitlines():
        if line.startswith("#") or " " not in line:
            continue
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        if name == "vllm:prompt_tokens_by_source_total":
            name = labels.partition('source="')[2].partition('"')[0]
        elif name == "vllm:kvpatch_offload_bytes_total":
            name += " " + labels.partition('outcome="')[2].partition('"')[0]
        found[name] = found.get(name, 0.0) + float(value)
    return found


def parse_counters(exposition: str) -> Counters:
    """Return the counters in a Prometheus text exposition."""
    found = sums(exposition)
    return Counters(
        computed=int(found.get("local_compute", 0)),
        from_cache=int(found.get("local_cache_hit", 0)),
        from_tier=int(found.get("external_kv_transfer", 0)),
        stored=int(found.get("vllm:kv_offload_store_bytes_total", 0)),
        loaded=int(found.get("vllm:kv_offload_load_bytes_total", 0)),
    )


@dataclass(frozen=True)
class Sample:
    """One look at the device: bytes charged to it, and bytes the OS really holds."""

    seconds: float
    mapped: int
    resident: int


@dataclass
class MemoryMeter:
    """Watches the host device's memory from outside the engine, on a thread.

    The mapped bytes are the device's ledger. The resident ones are the pages of the
    engine's memory file, so they show whether the operating system has them back.
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
        """Begin to sample."""
        self._begun = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end."""
        if self._thread.ident is not None and not self._stop.is_set():
            self._stop.set()
            self._thread.join()

    def phase(self, name: str) -> None:
        """Remember that something begins now."""
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
        """The most bytes that were mapped at once."""
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
