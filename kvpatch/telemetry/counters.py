"""Transfers and hits of an engine: counted on its own thread, a few additions per step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvpatch import state
from kvpatch.telemetry.fuse import Fuse

OUTCOMES = ("stored", "loaded", "dropped", "skipped")
# Calls to a running engine that kvpatch may refuse, while the engine goes on.
CALLS = ("suspend", "resume", "limit", "collective_rpc")

# More tokens of one request in a step than this are of its prompt: drafts are fewer.
OF_A_PROMPT = 16

# vLLM's counters of its OffloadingConnector, as the connector sends them to the API servers,
# by unit: the outcome that each corresponds to.
_BYTES = {"vllm:kv_offload_store_bytes": "stored", "vllm:kv_offload_load_bytes": "loaded"}
_TRANSFERS = {"vllm:kv_offload_store_size": "stored", "vllm:kv_offload_load_size": "loaded"}
_EVENTS = {
    "vllm:kv_offload_allocation_failure": "dropped",
    "vllm:kv_offload_stores_skipped": "skipped",
}
# Before vLLM 0.24: lists of transfers by direction.
_DIRECTIONS = {"GPU_to_CPU": "stored", "CPU_to_GPU": "loaded"}


@dataclass
class Moved:
    """What one connector moved: bytes and operations, by outcome."""

    moved_bytes: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)


@dataclass
class Totals:
    """Sums since the engine started; read from other threads without a lock."""

    connector: str = ""  # the class; empty without one
    moved_bytes: Counter[str] = field(default_factory=Counter)  # over all ranks, by outcome
    operations: Counter[str] = field(default_factory=Counter)  # transfers, or attempts, by outcome
    parts: dict[str, Moved] = field(default_factory=dict)  # of each connector
    refused: Counter[str] = field(default_factory=Counter)  # calls, by one of ``CALLS``
    hits: Counter[str] = field(default_factory=Counter)  # tokens by source
    queries: Counter[str] = field(default_factory=Counter)  # prompt tokens looked up, by source
    from_disk: int = 0  # such tokens that are not among the hits yet, up to vLLM 0.31
    lost_tokens: int = 0  # prompt tokens computed again, as no cache had them any more
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0  # their part of the time of steps
    saved_seconds: float = 0.0  # prefill that the tier's hits made needless
    steps: int = 0
    stepped: float = field(default_factory=time.monotonic)  # when the last step ended
    executed: int = 0  # steps in which the model ran
    counts_hits: bool = False  # vLLM does not if its stats are disabled
    fuse: Fuse = field(default_factory=lambda: Fuse("counting transfers and hits"))
    _scheduled: tuple[int, int] = (0, 0)  # tokens of prompts, and all, since the last step
    _moved: tuple[int, ...] = ()
    _moved_at: float = 0.0
    _begun: float = 0.0

    def step(self, executed: bool) -> None:
        """Record that the engine has completed a step, and whether the model ran in it."""
        now = time.monotonic()
        prompts, every = self._scheduled
        if executed and every:
            self.prefill_tokens += prompts
            self.prefill_seconds += (now - max(self.stepped, self._begun)) * prompts / every
            self._scheduled, self._begun = (0, 0), now
        self.steps += 1
        self.executed += executed
        self.stepped = now

    def scheduled(self, tokens: Collection[int]) -> None:
        """Record the tokens of each request of a step that begins."""
        prompts, every = self._scheduled
        if not every:
            self._begun = time.monotonic()
        self._scheduled = (
            prompts + sum(one for one in tokens if one > OF_A_PROMPT),
            every + sum(tokens),
        )

    @property
    def prefill_rate(self) -> float:
        """Tokens of prompts that are computed per second; 0 before any was."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    def waits(self, could_move: bool) -> float:
        """Return for how many seconds nothing has moved, though requests wait and none runs."""
        now = time.monotonic()
        moved = (self.executed, *self.operations.values())
        if not could_move or moved != self._moved:
            self._moved, self._moved_at = moved, now
        return now - self._moved_at

    def moved(self, outcome: str, operations: int, size: int = 0, connector: str = "") -> None:
        """Add transfers or attempts, one of ``OUTCOMES``, and their bytes over all ranks."""
        if outcome not in OUTCOMES:
            raise ValueError(f"no outcome {outcome}; there are {', '.join(OUTCOMES)}")
        part = self.parts.setdefault(connector or self.connector, Moved())
        for counts in (self, part):
            if operations:
                counts.operations[outcome] += operations
            if size:
                counts.moved_bytes[outcome] += size

    def add_connector_stats(self, data: dict[str, Any]) -> None:
        """Add the stats of vLLM's OffloadingConnector for one step.

        ``OffloadingConnectorStats.data`` has values by metric and labels; before vLLM 0.24,
        transfers by direction. ``MultiKVConnectorStats.data`` has the stats of each connector, by
        its name.
        """
        for connector, own in _by_connector(self.connector, data):
            self._add(connector, own)

    def _add(self, connector: str, data: dict[str, Any]) -> None:
        for direction, transfers in data.items():
            if direction in _DIRECTIONS:
                size = sum(transfer.op_size for transfer in transfers)
                self.moved(_DIRECTIONS[direction], len(transfers), size, connector)
        for name, by_labels in data.get("data", {}).items():
            values = by_labels.values()
            if name in _BYTES:
                self.moved(_BYTES[name], 0, int(sum(values)), connector)
            elif name in _TRANSFERS:
                self.moved(_TRANSFERS[name], sum(map(len, values)), connector=connector)
            elif name in _EVENTS:
                self.moved(_EVENTS[name], int(sum(values)), connector=connector)

    def add_hits(self, source: str, stats: Any) -> None:
        """Add the ``PrefixCacheStats`` of one step, or None."""
        if stats is not None:
            self.counts_hits = True
            self.hits[source] += stats.hits
            self.queries[source] += stats.queries
            if source == "tier":
                if rate := self.prefill_rate:
                    self.saved_seconds += stats.hits / rate
                self._add_sources(getattr(stats, "hits_by_source", None))

    def _add_sources(self, sources: dict[Any, int] | None) -> None:
        """Add what of the tier's hits came from a disk; before vLLM 0.32 a row counts it."""
        if sources is not None:
            self.hits["disk"] += sum(
                tokens for source, tokens in sources.items() if source.value == "disk"
            )
        self.hits["disk"] += self.from_disk
        self.from_disk = 0


def refused(engine: Any, call: Any) -> None:
    """Count a call that an ``EngineCore`` does not do, if it is one of ``CALLS``."""
    totals = state.find(engine, Totals)
    if totals is not None and call in CALLS:
        totals.refused[call] += 1


def _by_connector(name: str, data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the data of each connector with its name, in a MultiConnector or by itself."""
    inside = {child: getattr(stats, "data", None) for child, stats in data.items()}
    children = {child: own for child, own in inside.items() if isinstance(own, dict)}
    if not children:
        yield name, data
    for child, own in children.items():
        yield from _by_connector(child, own)
