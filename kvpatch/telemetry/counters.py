"""Transfers and hits of an engine: counted on its own thread, a few additions per step."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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
        counts_hits: whether vLLM counts hits; it does not if its stats are disabled.
    """

    connector: str = ""
    moved_bytes: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    queries: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    stepped: float = field(default_factory=time.monotonic)
    counts_hits: bool = False

    def step(self) -> None:
        """Record that the engine has completed a step."""
        self.steps += 1
        self.stepped = time.monotonic()

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
                vLLM 0.24, transfers by direction.
        """
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
