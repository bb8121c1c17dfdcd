"""The hooks for metrics: once per step in the engine, once per message in the API servers."""

from __future__ import annotations

import threading
from typing import Any

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.patches.fence.hooks import fence_of
from kvpatch.patches.metrics import snapshot
from kvpatch.status import record
from kvpatch.telemetry import publisher
from kvpatch.telemetry.counters import Moved, Totals
from kvpatch.telemetry.fuse import Fuse
from kvpatch.telemetry.prometheus import SERIES, Classes, Metrics
from kvpatch.telemetry.series import KEY, Configured, Holds, Sender
from kvpatch.upstream import connectors, kvcached_api
from kvpatch.version import VERSION

# Seconds between two messages of a busy engine, to keep their cost per step negligible; a step
# after which the engine is idle always sends, so that the final values are complete.
BETWEEN = 0.2
WATCHES = "MPClientEngineMonitor"  # vLLM's name of that thread


def around_engine_core(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Start counting and publishing an engine. Wraps ``EngineCore.__init__``."""
    wrapped(*args, **kwargs)
    totals = Totals()
    with totals.fuse:
        connector = instance.scheduler.connector
        totals.connector = "" if connector is None else type(connector).__name__
        state.attach(instance, totals)
        state.attach(instance.scheduler, totals)
        for part in connectors.parts(connector) if connector is not None else ():
            totals.parts[type(part).__name__] = Moved()
            # SimpleCPUOffloadConnector's, OffloadingConnector's
            for name in ("scheduler_manager", "connector_scheduler"):
                scheduler = getattr(part, name, None)
                if scheduler is not None:
                    state.attach(scheduler, totals)
    # The description has no reference to the engine, which a program may delete.
    publisher.engine(instance, lambda core: snapshot.engine(core, totals))


def around_make_stats(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Count a step's transfers and hits; it has the connector's stats even if vLLM's are off."""
    stats = wrapped(*args, **kwargs)
    totals = state.find(instance, Totals)
    if totals is None or totals.fuse.off:
        return stats
    with totals.fuse:
        connector = kwargs.get("kv_connector_stats", args[1] if len(args) > 1 else None)
        if connector is not None:
            totals.add_connector_stats(connector.data)
        if stats is not None:
            totals.add_hits("device", stats.prefix_cache_stats)
            totals.add_hits("tier", stats.connector_prefix_cache_stats)
    return stats


def after_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Send the changes to the API servers, with the step's own stats; over the fence's patch."""
    result = wrapped(*args, **kwargs)
    totals = state.find(instance, Totals)
    if totals is None:
        return result
    with totals.fuse:
        totals.step(bool(result[1]))  # also when counting is off: it tells a stuck engine
        if not totals.fuse.off:
            fence = fence_of(instance)
            if fence is not None:
                state.of(instance, Holds).look(fence.held, totals.stepped, fence.changes)
            _send(instance, totals, result[0] or {})
    return result


def _send(core: Any, totals: Totals, outputs: dict[int, Any]) -> None:
    scheduler, sender = core.scheduler, state.of(core, Sender)
    if scheduler.has_unfinished_requests() and totals.stepped - sender.sent < BETWEEN:
        return
    for output in outputs.values():
        stats = output.scheduler_stats
        if stats is not None:
            sender.sent = totals.stepped
            held = state.of(core, Holds).take()
            message = sender.message(snapshot.engine(core, totals), held)
            if message is not None:
                stats.kv_connector_stats = (stats.kv_connector_stats or {}) | {KEY: message}


def around_prometheus(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvpatch's series next to the connector's. Wraps ``KVConnectorProm.__init__``."""
    wrapped(*args, **kwargs)

    def bind(vllm_config: Any, labelnames: Any, per_engine_labelvalues: Any) -> tuple[Any, ...]:
        return vllm_config, labelnames, per_engine_labelvalues

    with Fuse(SERIES):
        config, labelnames, engines = bind(*args, **kwargs)
        transfer = config.kv_transfer_config
        connector = "" if transfer is None else transfer.kv_connector or ""
        facts = [*labels_of_process(), connector]
        classes = Classes(instance._counter_cls, instance._gauge_cls, instance._histogram_cls)
        features = {name: outcome.value for name, outcome in record.features.items()}
        leaves = connectors.leaves(transfer)
        configured = Configured(
            tuple(leaf.name for leaf in leaves),
            tuple((leaf.name, str(tier.get("type"))) for leaf in leaves for tier in leaf.tiers),
        )
        metrics = Metrics(classes, labelnames, engines, facts, features, configured)
        state.attach(instance, metrics)
        # Here, because only API servers read pages.
        from kvpatch.telemetry import follower

        follower.follow(metrics)


def around_client_shutdown(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Tell an engine that died from one that was stopped with its server.

    The thread that watches engines calls it when one ended first; after a signal with 0.
    """
    if threading.current_thread().name == WATCHES:
        resources = getattr(instance, "resources", None)
        processes = getattr(getattr(resources, "engine_manager", None), "processes", ())
        if any(one.exitcode for one in processes):
            publisher.engine_died()
    return wrapped(*args, **kwargs)


def labels_of_process() -> list[str]:
    """Return the labels of the info gauge that describe this process."""
    layout = "contiguous" if kvcached_api.contiguous() else "non-contiguous"
    vllm = "" if record.facts is None else record.facts.vllm.text
    return [VERSION, vllm, record.kvcached, layout]


def without_ours(stats: dict[str, Any]) -> dict[str, Any]:
    """Return the stats without kvpatch's part."""
    return {key: value for key, value in stats.items() if key != KEY}


def around_observe(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Record kvpatch's part of the stats, and pass the rest to the connector."""

    def bind(transfer_stats_data: Any, engine_idx: int = 0) -> tuple[Any, int]:
        return transfer_stats_data, engine_idx

    stats, engine = bind(*args, **kwargs)
    metrics = state.find(instance, Metrics)
    if KEY in stats:
        if metrics is not None and not metrics.fuse.off:
            with metrics.fuse:
                metrics.observe(stats[KEY], engine)
        stats = without_ours(stats)
    if stats:
        wrapped(stats, engine)


def around_log(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Keep kvpatch's part out of the connector's log line, which fails without a connector."""
    stats = argument(args, kwargs, 0, "transfer_stats_data")
    stats = without_ours(stats)
    if stats:
        wrapped(stats)
