"""What an engine has moved and hit so far: counted on its own thread, a few additions a step."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

OUTCOMES = ("stored", "loaded", "dropped", "skipped")

# vLLM's own counters of its OffloadingConnector, as they pass from the connector to
# the API servers: which outcome of ours each is, in what unit.
_BYTES = {"vllm:kv_offload_store_bytes": "stored", "vllm:kv_offload_load_bytes": "loaded"}
_TRANSFERS = {"vllm:kv_offload_store_size": "stored", "vllm:kv_offload_load_size": "loaded"}
_EVENTS = {
    "vllm:kv_offload_allocation_failure": "dropped",
    "vllm:kv_offload_stores_skipped": "skipped",
}
# Before vLLM 0.24 they are lists of transfers, by direction.
_DIRECTIONS = {"GPU_to_CPU": "stored", "CPU_to_GPU": "loaded"}


@dataclass
class Totals:
    """Sums since the engine started; read from other threads without a lock.

    Attributes:
        connector: the class of the KV connector, or an empty string.
        moved_bytes: bytes over all ranks, by outcome ``stored`` or ``loaded``.
        operations: transfers, or attempts, by outcome.
        hits, queries: prompt tokens found and asked for, by source ``device`` or ``tier``.
        steps: steps of the engine.
        stepped: when the last one ended, on the machine's clock.
        counts_hits: whether vLLM counts hits; it does not with its stats switched off.
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
        """Take note that the engine has made a step."""
        self.steps += 1
        self.stepped = time.monotonic()

    def moved(self, outcome: str, operations: int, size: int = 0) -> None:
        """Add transfers, or attempts at them; for connectors that keep no stats of their own.

        Raises:
            ValueError: there is no such outcome.
        """
        if outcome not in OUTCOMES:
            raise ValueError(f"no outcome {outcome}; there are {', '.join(OUTCOMES)}")
        self.operations[outcome] += operations
        if size:
            self.moved_bytes[outcome] += size

    def add_connector_stats(self, data: dict[str, Any]) -> None:
        """Add what vLLM's OffloadingConnector reports of one step.

        Args:
            data: ``OffloadingConnectorStats.data``, values by metric and labels; before
                vLLM 0.24 transfers by direction.
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
        """Add a ``PrefixCacheStats`` of one step."""
        if stats is not None:
            self.counts_hits = True
            self.hits[source] += stats.hits
            self.queries[source] += stats.queries
