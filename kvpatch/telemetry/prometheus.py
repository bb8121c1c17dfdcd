"""The ``vllm:kvpatch_`` series of one API server."""

from __future__ import annotations

from typing import Any

from kvpatch.telemetry.fuse import Fuse
from kvpatch.telemetry.series import COUNTERS, GAUGES, INFO, Series

PREFIX = "vllm:kvpatch_"
SERIES = f"the part of /metrics that is {PREFIX}*"


class Metrics:
    """Registers the series, and records the messages of the engines.

    Args:
        counter, gauge: the classes of vLLM's own metrics, Prometheus' or Ray's.
        labelnames: vLLM's labels, which come first.
        per_engine_labelvalues: their values, by engine.
        facts: the values of the info gauge's own labels, ``series.INFO``.

    Attributes:
        fuse: switches the series off at an error, which must not end the API server.
    """

    def __init__(
        self,
        counter: Any,
        gauge: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
        facts: list[str],
    ) -> None:
        self.fuse = Fuse(SERIES)
        self._engines = per_engine_labelvalues
        self._counters = {
            series.name: counter(
                name=PREFIX + series.name,
                documentation=series.help,
                labelnames=[*labelnames, *series.labels],
            )
            for series in COUNTERS
        }
        self._gauges = {
            series.name: self._gauge(gauge, series, labelnames) for series in (*GAUGES, INFO)
        }
        for labels in per_engine_labelvalues.values():
            self._gauges[INFO.name].labels(*labels, *facts).set(1)

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
        own = self._engines[engine]
        for name, entries in message["counters"].items():
            for labels, value in entries:
                self._counters[name].labels(*own, *labels).inc(value)
        for name, entries in message["gauges"].items():
            for labels, value in entries:
                set_as_of(self._gauges[name].labels(*own, *labels), value, message["at"])


def set_as_of(gauge: Any, value: float, when: float) -> None:
    """Set a gauge to its value at ``when``, in seconds since the epoch.

    Two API servers may process two messages in reverse order, and prometheus_client shows
    the value that was set last; its own ``set`` takes no timestamp.
    """
    stored = getattr(gauge, "_value", None)
    if stored is None:  # Ray's gauges have one value for all processes
        gauge.set(value)
    else:
        stored.set(value, timestamp=when)
