"""Transfers and hits of an engine: counted on its own thread, a few additions per step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvpatch.telemetry.fuse import Fuse

OUTCOMES = ("stored", "loaded", "dropped", "skipped")

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
class Totals:
    """Sums since the engine started; read from other threads without a lock.

    Attributes:
        connector: the class of the KV connector, or an empty string.
        moved_bytes: bytes over all ranks, by outcome ``stored`` or ``loaded``.
        operations: transfers, or attempts, by outcome.
        hits, queries: prompt tokens found and looked up, by source ``device`` or ``tier``.
        steps: steps of the engine.
        stepped: when the last step ended, on the monotonic clock.
        executed: steps in which the model ran.
        counts_hits: whether vLLM counts hits; it does not if its stats are disabled.
        fuse: switches counting off at an error, which must not end the engine.
    """

    connector: str = ""
    moved_bytes: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    queries: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    stepped: float = field(default_factory=time.monotonic)
    executed: int = 0
    counts_hits: bool = False
    fuse: Fuse = field(default_factory=lambda: Fuse("counting transfers and hits"))
    _moved: tuple[int, ...] = ()
    _moved_at: float = 0.0

    def step(self, executed: bool) -> None:
        """Record that the engine has completed a step, and whether the model ran in it."""
        self.steps += 1
        self.executed += executed
        self.stepped = time.monotonic()

    def waits(self, could_move: bool) -> float:
        """Return for how many seconds nothing has moved; called more often than that.

        An engine whose requests all wait for memory completes thousands of steps per second,
        in none of which the model runs.

        Args:
            could_move: whether requests wait and none runs; if not, the time starts again.
        """
        now = time.monotonic()
        moved = (self.executed, *self.operations.values())
        if not could_move or moved != self._moved:
            self._moved, self._moved_at = moved, now
        return now - self._moved_at

    def moved(self, outcome: str, operations: int, size: int = 0) -> None:
        """Add transfers, or attempts; for connectors without stats of their own.

        Raises:
            ValueError: there is no such outcome.
        """
        if outcome not in OUTCOMES:
            raise ValueError(f"no outcome {outcome}; there are {', '.join(OUTCOMES)}")
        self.operations[outcome] += operations
        if size:
            self.moved_bytes[outcome] += size

    def add_connector_stats(self, data: dict[str, Any]) -> None:
        """Add the stats of vLLM's OffloadingConnector for one step.

        Args:
            data: ``OffloadingConnectorStats.data``: values by metric and labels; before
                vLLM 0.24, transfers by direction. Or ``MultiKVConnectorStats.data``: the
                stats of each connector inside a MultiConnector, by its name.
        """
        for own in _by_connector(data):
            self._add(own)

    def _add(self, data: dict[str, Any]) -> None:
        for direction, transfers in data.items():
            if direction in _DIRECTIONS:
                size = sum(transfer.op_size for transfer in transfers)
                self.moved(_DIRECTIONS[direction], len(transfers), size)
        for name, by_labels in data.get("data", {}).items():
            if name in _BYTES:
                self.moved_bytes[_BYTES[name]] += int(sum(by_labels.values()))
            elif name in _TRANSFERS:
                self.operations[_TRANSFERS[name]] += sum(map(len, by_labels.values()))
            elif name in _EVENTS:
                self.operations[_EVENTS[name]] += int(sum(by_labels.values()))

    def add_hits(self, source: str, stats: Any) -> None:
        """Add the ``PrefixCacheStats`` of one step, or None."""
        if stats is not None:
            self.counts_hits = True
            self.hits[source] += stats.hits
            self.queries[source] += stats.queries


def _by_connector(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Iterate over the data of each connector, inside a MultiConnector or by itself."""
    inside = [getattr(stats, "data", None) for stats in data.values()]
    children = [child for child in inside if isinstance(child, dict)]
    if not children:
        yield data
    for child in children:
        yield from _by_connector(child)
