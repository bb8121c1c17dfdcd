"""The metrics that an engine sends to the API servers, inside vLLM's own stats.

vLLM sends the stats of a step to one of its API servers. So counters are sent as increments
since the last message, which the servers' series sum up; gauges are sent as values with
the time they were read, and the most recent value is shown.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

from kvpatch.telemetry.counters import OUTCOMES

# Added to the connector's own keys in ``SchedulerStats.kv_connector_stats``.
KEY = "kvpatch"


class Series(NamedTuple):
    """One series of /metrics: its name without ``vllm:kvpatch_``, labels and help."""

    name: str
    labels: tuple[str, ...]
    help: str


COUNTERS = (
    Series(
        "offload_bytes",
        ("connector", "outcome"),
        "Bytes of KV cache that the connector moved, over all ranks: stored to its tier or "
        "loaded from it.",
    ),
    Series(
        "offload_operations",
        ("connector", "outcome"),
        "Transfers that ended (stored, loaded), and stores that were not made: dropped because "
        "the tier had no room, skipped because the block was not worth it.",
    ),
    Series(
        "host_pool_evicted_blocks",
        (),
        "Blocks of the CPU tier that were evicted because another engine or a lower limit took "
        "their memory.",
    ),
    Series("fence_released_pages", (), "Pages of KV cache given back through the fence."),
    Series(
        "fence_held_pages",
        ("rule",),
        "Pages that had to wait before they were given back: for a plan of transfers to be made, "
        "or for a transfer to end.",
    ),
)
GAUGES = (
    Series(
        "device_bytes",
        ("state",),
        "kvcached's KV memory on the device: mapped and in use, reserved ahead, held back by the "
        "fence (a part of mapped), and the total that may be mapped.",
    ),
    Series("fence_longest_hold_steps", (), "Most steps that one page waited in the fence."),
    Series("tier_blocks", ("state",), "Blocks of the connector's CPU tier: used, and total."),
    Series(
        "host_pool_bytes",
        ("state",),
        "Host memory of the pool: committed by this engine, resident blocks in it, the ceiling of "
        "its tier, what all engines of the pool have committed (pool), and its limit.",
    ),
    Series(
        "host_pool_coldest_seconds", (), "Age of the coldest extent that this engine has committed."
    ),
)
INFO = Series(
    "info",
    ("kvpatch", "vllm", "kvcached", "features", "layout", "connector"),
    "What runs here; always 1.",
)

Values = dict[str, list[tuple[list[str], float]]]


def counters(state: dict[str, Any]) -> Values:
    """Return the counters of an engine's state (``snapshot.engine``), as sums so far."""
    connector = state["connector"]
    found: Values = {}
    if connector:
        found["offload_bytes"] = [
            ([connector, outcome], size) for outcome, size in state["bytes"].items()
        ]
        found["offload_operations"] = [
            ([connector, outcome], state["operations"][outcome]) for outcome in OUTCOMES
        ]
    if state["host_pool"] is not None:
        found["host_pool_evicted_blocks"] = [([], state["host_pool"]["evicted"])]
    if state["fence"] is not None:
        fence = state["fence"]
        found["fence_released_pages"] = [([], fence["released"])]
        found["fence_held_pages"] = [
            (["plan"], fence["held_for_plan"]),
            (["transfer"], fence["held_for_transfer"]),
        ]
    return found


def gauges(state: dict[str, Any]) -> Values:
    """Return the gauges of an engine's state."""
    device, fence, tier = state["device"], state["fence"], state["tier"]
    host_pool = state["host_pool"]
    pages = {
        "mapped": device["mapped_pages"],
        "reserved": device["reserved_pages"],
        "held": fence["holding"] if fence else 0,
        "total": device["total_pages"],
    }
    found: Values = {
        "device_bytes": [([name], count * device["page_bytes"]) for name, count in pages.items()]
    }
    if fence is not None:
        found["fence_longest_hold_steps"] = [([], fence["longest_hold"])]
    if tier is not None:
        found["tier_blocks"] = [(["used"], tier["used_blocks"]), (["total"], tier["total_blocks"])]
    if host_pool is not None:
        names = ("committed", "resident", "ceiling", "pool", "limit")
        found["host_pool_bytes"] = [([name], host_pool[name]) for name in names]
        found["host_pool_coldest_seconds"] = [([], host_pool["coldest"] or 0)]
    return found


class Sender:
    """Builds an engine's messages: the changes since the previous one.

    Attributes:
        sent: when the last one was sent, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.sent = 0.0
        self._at = 0.0
        self._sent: dict[tuple[str, ...], float] = {}

    def message(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return the next message; None if nothing has changed."""
        added = self._changed("counter", counters(state), as_difference=True)
        current = self._changed("gauge", gauges(state), as_difference=False)
        if not added and not current:
            return None
        return {"at": self._now(), "counters": added, "gauges": current}

    def _now(self) -> float:
        """Return the time, later than that of every message before.

        When the clock steps back, the servers would show the gauges of the time before it
        until the clock has caught up.
        """
        self._at = max(time.time(), math.nextafter(self._at, math.inf))
        return self._at

    def _changed(self, kind: str, values: Values, as_difference: bool) -> Values:
        changed: Values = {}
        for name, entries in values.items():
            for labels, value in entries:
                key = (kind, name, *labels)
                before = self._sent.get(key)
                if before == value:
                    continue
                self._sent[key] = value
                sent = value - (before or 0) if as_difference else value
                # A counter is also sent at 0, so that its series exists from the start.
                changed.setdefault(name, []).append((labels, sent))
        return changed
