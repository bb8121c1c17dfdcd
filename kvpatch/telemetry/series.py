"""The metrics that an engine sends to the API servers, inside vLLM's own stats.

vLLM sends the stats of a step to one of its API servers. So counters are sent as increments
since the last message, which the servers' series sum up; gauges are sent as values with
the time they were read, and the most recent value is shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from kvpatch.environ import HOST_POOL
from kvpatch.telemetry import disk as disk_counts
from kvpatch.telemetry.counters import CALLS, OUTCOMES
from kvpatch.telemetry.suspended import REASONS

# Added to the connector's own keys in ``SchedulerStats.kv_connector_stats``.
KEY = "kvpatch"


class Series(NamedTuple):
    """One series of /metrics, without ``vllm:kvpatch_``; a histogram has bounds of buckets."""

    name: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


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
        "refused_calls",
        ("call",),
        "Calls that kvpatch refused to the running engine, which goes on: kvpatch suspend, resume "
        "and limit, and collective_rpc with new weights.",
    ),
    Series(
        "verified_blocks",
        ("outcome",),
        "Blocks that debug mode looked at after a copy, of engines with one rank: stored and "
        "loaded were right, unverified could not be compared; a wrong one ends the engine.",
    ),
    Series(
        "lookup_tokens",
        ("tier",),
        "Prompt tokens that were looked up in the device's cache (device), of those in the CPU "
        "tier what the device did not have (cpu), and of those in secondary tiers what the CPU "
        "tier did not have (disk).",
    ),
    Series(
        "hit_tokens",
        ("tier",),
        "Prompt tokens that were found: on the device, in the CPU tier or on a disk.",
    ),
    Series(
        "lost_hit_tokens",
        (),
        "Prompt tokens that were computed again, because no tier had them any more or ever: what "
        "a tier without a limit would have served in addition to hit_tokens, at least.",
    ),
    Series(
        "disk_bytes",
        ("connector", "tier", "outcome"),
        "Bytes of KV cache that a secondary tier wrote to its disk (stored) or read from it "
        "(loaded); a block that has a file already is not written again. Of block files that this "
        "engine removed because of KVPATCH_TIER_SIZE, evicted.",
    ),
    Series(
        "disk_errors",
        ("connector", "tier", "error"),
        "Errors of a secondary tier's disk, after which its blocks are misses: a job that could "
        "not write all of its blocks (store) or not read them (load), a file that does not hold "
        "what was stored (damaged), a look for files that failed (lookup), a job that was not "
        "begun because the disk does not answer (late), a block for which KVPATCH_TIER_SIZE or the "
        "disk had no room (full), a file that was removed to make room before it was read (gone).",
    ),
    Series(
        "host_pool_evicted_blocks",
        (),
        "Blocks of the CPU tier that were evicted because another engine or a lower limit took "
        "their memory.",
    ),
    Series(
        "suspended_seconds",
        (),
        "Seconds in which the engine was suspended, without memory for requests; those of a "
        "suspension are added when it ends.",
    ),
    Series(
        "spilled_blocks",
        ("reason",),
        "Blocks whose store into the CPU tier began because their memory was to be given back: for "
        "a suspension (suspend), for a lower limit (limit), or after a while without requests "
        "(idle); not those that the tier had already.",
    ),
    Series(
        "restored_blocks",
        (),
        "Spilled blocks whose load from the CPU tier began since, each once for every time that it "
        "was spilled.",
    ),
    Series(
        "saved_prefill_seconds",
        (),
        "Seconds of prefill that hits of the CPU tier and of disks made needless, at the rate at "
        "which the engine computed prompts until then.",
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
        "kvcached's KV memory on one device, which adds up to what the device is charged for: "
        "mapped for blocks, reserved ahead, and zero, the page behind everything unmapped.",
    ),
    Series("device_limit_bytes", (), "KV memory that may be mapped at most, on one device."),
    Series(
        "device_lent_bytes",
        (),
        "KV memory on one device by which the limit is below the first one, KVPATCH_FIRST_LIMIT or "
        "all of the KV cache: what neighbours may map. While the engine is suspended, all but the "
        "page of block 0.",
    ),
    Series(
        "device_borrowed_bytes",
        (),
        "KV memory on one device by which the limit is above KVPATCH_FIRST_LIMIT; 0 without it.",
    ),
    Series("fence_held_bytes", (), "KV memory that the fence holds back now, a part of mapped."),
    Series(
        "tier_blocks", ("state",), "Blocks of the connector's CPU tier: used and free add up to it."
    ),
    Series(
        "tier_bytes",
        ("connector", "tier", "state"),
        "Host memory of each connector's CPU tier, over all ranks: used for blocks and free, which "
        "add up to the size that is configured.",
    ),
    Series(
        "disk_tier_bytes",
        ("connector", "tier", "state"),
        "Bytes of block files of this user, of all engines, in the folder of a secondary tier with "
        "KVPATCH_TIER_SIZE, as of its last store: used and free add up to it.",
    ),
    Series(
        "last_step_timestamp_seconds", (), "When the engine completed a step last, in Unix time."
    ),
    Series("suspended", (), "Whether the engine is suspended, or on its way there: 1 or 0."),
    Series(
        "suspended_requests",
        (),
        "Requests that wait for an engine because it is suspended; vLLM sends no stats meanwhile.",
    ),
    Series("elastic", (), "Whether the KV cache is on kvcached's elastic memory: 1 or 0."),
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
HISTOGRAMS = (
    Series(
        "fence_hold_seconds",
        (),
        "How long the fence held pages back, in seconds, as seen after every step.",
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
    ),
)
INFO = Series(
    "info",
    ("kvpatch", "vllm", "kvcached", "layout", "connector"),
    "What runs here; always 1.",
)
FEATURE = Series("feature", ("feature", "state"), "The state of each feature of kvpatch; always 1.")
RULES = ("plan", "transfer")
MOVED = ("stored", "loaded")
_OF_SUSPENSIONS: dict[str, list[list[str]]] = {
    "suspended_seconds": [[]],
    "spilled_blocks": [[reason] for reason in REASONS],
    "restored_blocks": [[]],
}

Values = dict[str, list[tuple[list[str], float]]]


class Configured(NamedTuple):
    """What an engine is configured with, by names."""

    connectors: tuple[str, ...] = ()  # those inside a MultiConnector, and not itself
    disks: tuple[tuple[str, str], ...] = ()  # the connector and the type of each secondary tier
    suspends: bool = False  # whether engines can be suspended, as far as an API server can tell


def at_start(configured: Configured) -> dict[str, list[list[str]]]:
    """Return the labels of every counter and histogram of an engine, which start at 0."""
    names, disks = sorted(set(configured.connectors)), sorted(set(configured.disks))
    tiers = [["device"], *([["cpu"]] if names else ()), *([["disk"]] if disks else ())]
    always = {
        "lookup_tokens": tiers,
        "hit_tokens": tiers,
        "lost_hit_tokens": [[]],
        "refused_calls": [[call] for call in CALLS],
    }
    if not names:
        return always
    return always | {
        "offload_bytes": [[name, outcome] for name in names for outcome in MOVED],
        "offload_operations": [[name, outcome] for name in names for outcome in OUTCOMES],
        "saved_prefill_seconds": [[]],
        "fence_released_pages": [[]],
        "fence_held_pages": [[rule] for rule in RULES],
        "fence_hold_seconds": [[]],
        **_of_disks(disks),
        **({"host_pool_evicted_blocks": [[]]} if HOST_POOL.read() else {}),
        **(_OF_SUSPENSIONS if configured.suspends else {}),
    }


def _of_disks(disks: list[tuple[str, str]]) -> dict[str, list[list[str]]]:
    if not disks:
        return {}
    return {
        "disk_bytes": [[*disk, outcome] for disk in disks for outcome in disk_counts.OUTCOMES],
        "disk_errors": [[*disk, kind] for disk in disks for kind in disk_counts.ERRORS],
    }


def counters(state: dict[str, Any]) -> Values:
    """Return the counters of an engine's state (``snapshot.engine``), as sums so far."""
    found: Values = {}
    for name, moved in _parts(state).items():
        for kind in ("bytes", "operations"):
            found.setdefault(f"offload_{kind}", []).extend(
                ([name, outcome], count) for outcome, count in moved[kind].items()
            )
    refused = state.get("refused", {})
    found["refused_calls"] = [([call], count) for call, count in refused.items()]
    if (verified := state.get("verified")) is not None:
        found["verified_blocks"] = [([outcome], count) for outcome, count in verified.items()]
    for disk in state.get("disks", ()):
        of = [disk["connector"], disk["tier"]]
        for name, labelled in (("disk_bytes", disk["bytes"]), ("disk_errors", disk["errors"])):
            entries = [([*of, label], count) for label, count in labelled.items()]
            found[name] = _added(found.get(name, []), entries)
    if state.get("host_pool") is not None:
        found["host_pool_evicted_blocks"] = [([], state["host_pool"]["evicted"])]
    if (suspended := state.get("suspended")) is not None:
        found["suspended_seconds"] = [([], suspended["seconds"])]
        spilled = suspended["spilled"].items()
        found["spilled_blocks"] = [([reason], count) for reason, count in spilled]
        found["restored_blocks"] = [([], suspended["restored"])]
    found |= _lookups(state)
    if state["connector"] and "saved_seconds" in state:
        found["saved_prefill_seconds"] = [([], state["saved_seconds"])]
    if state["fence"] is not None:
        fence = state["fence"]
        found["fence_released_pages"] = [([], fence["released"])]
        found["fence_held_pages"] = [([rule], fence[f"held_for_{rule}"]) for rule in RULES]
    return found


def _parts(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if not state["connector"]:
        return {}
    whole = {"bytes": state["bytes"], "operations": state["operations"]}
    return state.get("parts") or {state["connector"]: whole}


def _lookups(state: dict[str, Any]) -> Values:
    """Return the lookups of each tier; what one does not have is looked up in the next."""
    found: Values = {"lost_hit_tokens": [([], state.get("lost_tokens", 0))]}
    hits, queries = state.get("hits"), state.get("queries")
    if hits is None or queries is None:  # vLLM counts none, or none yet
        return found
    disk = hits.get("disk", 0)
    had = {"device": hits.get("device", 0), "cpu": hits.get("tier", 0) - disk, "disk": disk}
    asked = {"device": queries.get("device", 0), "cpu": queries.get("tier", 0)}
    asked["disk"] = asked["cpu"] - had["cpu"]
    tiers = ["device"]
    if state["connector"]:
        tiers.append("cpu")
    if state.get("disks"):
        tiers.append("disk")
    found["lookup_tokens"] = [([tier], asked[tier]) for tier in tiers]
    found["hit_tokens"] = [([tier], had[tier]) for tier in tiers]
    return found


def _added(
    one: list[tuple[list[str], float]], other: list[tuple[list[str], float]]
) -> list[tuple[list[str], float]]:
    """Return the sums by labels: two tiers of one type are one series."""
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in (*one, *other):
        sums[tuple(labels)] = sums.get(tuple(labels), 0) + value
    return [(list(labels), value) for labels, value in sums.items()]


def gauges(state: dict[str, Any], at: float | None = None) -> Values:
    """Return the gauges of an engine's state, as it was at ``at``; now if that is not given."""
    device, fence, tier = state["device"], state["fence"], state["tier"]
    host_pool = state.get("host_pool")
    pages = {
        "mapped": device["mapped_pages"],
        "reserved": device["reserved_pages"],
    }
    page = device["page_bytes"]
    seen = time.time() if at is None else at
    found: Values = {
        "device_bytes": [
            *(([name], count * page) for name, count in pages.items()),
            (["zero"], state.get("zero_page_bytes", 0)),
        ],
        "device_limit_bytes": [([], device["total_pages"] * page)],
        # To the second, so that an engine without other news sends once a second.
        "last_step_timestamp_seconds": [([], math.floor(seen - state["since_step"]))],
    }
    if (first := state.get("first_limit_bytes")) is not None:
        more = device["total_pages"] * page - first
        found["device_lent_bytes"] = [([], max(0, -more))]
        found["device_borrowed_bytes"] = [([], max(0, more))]
    if state.get("suspended") is not None and (phase := state.get("phase")):
        away = phase not in ("runs", "resuming")
        requests = sum(state["requests"].values()) if away else 0
        found["suspended"] = [([], int(away))]
        found["suspended_requests"] = [([], requests)]
    if state.get("elastic") is not None:
        found["elastic"] = [([], int(state["elastic"]))]
    if fence is not None:
        found["fence_held_bytes"] = [([], fence["holding"] * page)]
    if tier is not None:
        used, total = tier["used_blocks"], tier["total_blocks"]
        found["tier_blocks"] = [(["used"], used), (["free"], total - used)]
    for one in state.get("tiers", ()):
        used, size = one["used_bytes"], one["total_bytes"]
        states = {"used": used, "free": size - used}
        entries = [([one["connector"], one["tier"], name], held) for name, held in states.items()]
        found["tier_bytes"] = _added(found.get("tier_bytes", []), entries)
    for one in state.get("disks", ()):
        if (size := one.get("size_bytes")) is not None:
            held, of = one["held_bytes"], [one["connector"], one["tier"]]
            entries = [([*of, "used"], held), ([*of, "free"], max(0, size - held))]
            found["disk_tier_bytes"] = _added(found.get("disk_tier_bytes", []), entries)
    if host_pool is not None:
        names = ("committed", "resident", "ceiling", "pool", "limit")
        found["host_pool_bytes"] = [([name], host_pool[name]) for name in names]
        if host_pool["coldest"] is not None:
            found["host_pool_coldest_seconds"] = [([], host_pool["coldest"])]
    return found


class Holds:
    """How long pages were held back, told from which pages are held after each step."""

    _NEXT = 1.0  # seconds to the next step of an engine that is not idle, at most

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._looked = 0.0
        self._changes: int | None = None
        self._ended: list[float] = []

    def look(self, held: Collection[int], now: float, changes: int | None = None) -> None:
        """Record the pages that are held ``now``; those given back between steps do not count."""
        if changes is None or changes != self._changes:
            end = min(now, self._looked + self._NEXT)
            for page in self._since.keys() - held:
                self._ended.append(round(max(0.0, end - self._since.pop(page)), 6))
            for page in held:
                self._since.setdefault(page, now)
        self._looked, self._changes = now, changes

    def take(self) -> list[float]:
        """Return the seconds of each hold that has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended


class Sender:
    """Builds an engine's messages: the changes since the previous one."""

    def __init__(self) -> None:
        self.sent = 0.0  # when, on the monotonic clock
        self.more: Callable[[], dict[str, Any]] = dict  # what a feature adds
        self._at = 0.0
        self._sent: dict[tuple[str, ...], float] = {}

    def message(self, state: dict[str, Any], held: Sequence[float] = ()) -> dict[str, Any] | None:
        """Return the next message on ``snapshot.engine`` and ended holds; None for no change."""
        state = state | self.more()
        added = self._changed("counter", counters(state), as_difference=True)
        current = self._changed("gauge", gauges(state), as_difference=False)
        if not added and not current and not held:
            return None
        observed: dict[str, Any] = {"fence_hold_seconds": [([], list(held))]} if held else {}
        return {"at": self._now(), "counters": added, "gauges": current, "histograms": observed}

    def _now(self) -> float:
        """Return the time on the monotonic clock, later than that of every message before."""
        self._at = max(time.monotonic(), math.nextafter(self._at, math.inf))
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
