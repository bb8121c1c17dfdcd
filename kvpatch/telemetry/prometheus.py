"""The ``vllm:kvpatch_`` series of one API server."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from kvpatch.telemetry import suspended
from kvpatch.telemetry.fuse import Fuse
from kvpatch.telemetry.series import (
    COUNTERS,
    FEATURE,
    GAUGES,
    HISTOGRAMS,
    INFO,
    Configured,
    Series,
    Values,
    at_start,
)

PREFIX = "vllm:kvpatch_"
SERIES = f"the part of /metrics that is {PREFIX}*"


class Classes(NamedTuple):
    """The classes of vLLM's own metrics, Prometheus' or Ray's."""

    counter: Any
    gauge: Any
    histogram: Any


class Metrics:
    """Registers the series, counts at 0 for Prometheus' ``rate``, and records messages."""

    def __init__(
        self,
        classes: Classes,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
        facts: list[str],
        features: dict[str, str],
        configured: Configured,
    ) -> None:
        self.fuse = Fuse(SERIES)
        self.engines = per_engine_labelvalues
        # A thread follows the status pages (``follower``), another records the messages.
        self._lock = threading.Lock()
        self.others: dict[str, tuple[int, int]] = {}  # pages that are not of its engines
        self._as_of: dict[int, float] = {}
        self._counters = {
            series.name: classes.counter(
                name=PREFIX + series.name,
                documentation=series.help,
                labelnames=[*labelnames, *series.labels],
            )
            for series in COUNTERS
        }
        self._gauges = {
            series.name: self._gauge(classes.gauge, series, labelnames)
            for series in (*GAUGES, INFO, FEATURE)
        }
        self._histograms = {
            series.name: classes.histogram(
                name=PREFIX + series.name,
                documentation=series.help,
                labelnames=[*labelnames, *series.labels],
                buckets=list(series.buckets),
            )
            for series in HISTOGRAMS
        }
        counted = self._counters | self._histograms
        suspends = suspended.expected(features, configured.connectors, configured.disks)
        configured = configured._replace(suspends=suspends)
        for labels in per_engine_labelvalues.values():
            self._gauges[INFO.name].labels(*labels, *facts).set(1)
            for feature in features.items():
                self._gauges[FEATURE.name].labels(*labels, *feature).set(1)
            for name, every in at_start(configured).items():
                for own in every:
                    counted[name].labels(*labels, *own)

    def _gauge(self, gauge: Any, series: Series, labelnames: list[str]) -> Any:
        # Each of several API servers has its own copy; the most recent one is shown.
        return gauge(
            name=PREFIX + series.name,
            documentation=series.help,
            labelnames=[*labelnames, *series.labels],
            multiprocess_mode="mostrecent",
        )

    def observe(self, message: dict[str, Any], engine: int) -> None:
        """Record one message of ``series.Sender``."""
        own = self.engines[engine]
        for name, entries in message["counters"].items():
            for labels, value in entries:
                self._counters[name].labels(*own, *labels).inc(value)
        with self._lock:
            self._as_of[engine] = max(message["at"], self._as_of.get(engine, 0.0))
            self._set(engine, message["gauges"], message["at"])
        for name, observed in message.get("histograms", {}).items():
            for labels, values in observed:
                histogram = self._histograms[name].labels(*own, *labels)
                for value in values:
                    histogram.observe(value)

    def show(self, engine: int, values: Values, at: float) -> None:
        """Set the gauges of an engine to its values, unless later ones are known."""
        with self._lock:
            if at > self._as_of.get(engine, 0.0):
                self._as_of[engine] = at
                self._set(engine, values, at)

    def _set(self, engine: int, values: Values, at: float) -> None:
        for name, entries in values.items():
            for labels, value in entries:
                set_as_of(self._gauges[name].labels(*self.engines[engine], *labels), value, at)


def set_as_of(gauge: Any, value: float, when: float) -> None:
    """Set a gauge to its value at ``when``: API servers may process messages in reverse order."""
    stored = getattr(gauge, "_value", None)
    if stored is None:  # Ray's gauges have one value for all processes
        gauge.set(value)
    else:
        stored.set(value, timestamp=when)
