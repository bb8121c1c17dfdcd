"""The ``vllm:kvpatch_`` series of one API server."""

from __future__ import annotations

from typing import Any

from kvpatch.telemetry.series import COUNTERS, GAUGES, INFO, Series

PREFIX = "vllm:kvpatch_"


class Metrics:
    """Registers the series, and records what the engines send.

    Args:
        counter, gauge: the classes vLLM makes its own metrics with, Prometheus' or Ray's.
        labelnames: vLLM's labels, which come first.
        per_engine_labelvalues: their values, by engine.
        facts: the values of the info gauge's own labels, ``series.INFO``.
    """

    def __init__(
        self,
        counter: Any,
        gauge: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
        facts: list[str],
    ) -> None:
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
        # With several API servers each has its own copy; the newest one is the truth.
        return gauge(
            name=PREFIX + series.name,
            documentation=series.help,
            labelnames=[*labelnames, *series.labels],
            multiprocess_mode="mostrecent",
        )

    def observe(self, message: dict[str, Any], engine: int) -> None:
        """Record one message of ``messages.Sender``."""
        own = self._engines[engine]
        for name, entries in message["counters"].items():
            for labels, value in entries:
                self._counters[name].labels(*own, *labels).inc(value)
        for name, entries in message["gauges"].items():
            for labels, value in entries:
                set_as_of(self._gauges[name].labels(*own, *labels), value, message["at"])


def set_as_of(gauge: Any, value: float, when: float) -> None:
    """Set a gauge to what it was at ``when``, in seconds since the epoch.

    Two API servers may come to two messages in the other order than they were sent in, and
    prometheus_client shows what was set last; its own ``set`` has no argument for the time.
    """
    stored = getattr(gauge, "_value", None)
    if stored is None:  # Ray's gauges have one value for all processes
        gauge.set(value)
    else:
        stored.set(value, timestamp=when)
