"""Metrics: ``kvpatch status`` and the ``vllm:kvpatch_`` series of vLLM's ``/metrics``."""

from __future__ import annotations

from kvpatch.rows import Row, feature
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import ENGINE_CORE

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_UNTIL = "kvcached and its connectors report to vLLM's stats themselves"
_EVERY_CONNECTOR = "vllm-project/vllm#57251 (metrics for every connector)"
_LOST = (
    "none: vLLM's stats have the hits, and not what was had before",
    "vLLM's stats say how many tokens were computed again",
)
_NO_SERIES = "vLLM has no metrics of KV connectors to extend"

FEATURE = feature(
    __name__,
    summary="`kvpatch status` and `/metrics` show what the engine maps, holds, stores and loads",
    since=FLOOR,
    until=_UNTIL,
    seams=(
        Row(
            "metrics.engine_core",
            f"{ENGINE_CORE}.__init__",
            "hooks:around_engine_core(self, vllm_config)",
            "the state of the engine is not visible outside the process",
            "ovg-project/kvcached#316 (is it on in this process?)",
        ),
        Row(
            "metrics.make_stats",
            f"{_SCHEDULER}.make_stats",
            "hooks:around_make_stats(self, spec_decoding_stats, kv_connector_stats)",
            "stored, loaded and hit counts are sent per step and not accumulated",
            "none: the connector's stats are its own",
        ),
        Row(
            "metrics.step",
            f"{ENGINE_CORE}.step",
            "hooks:after_step",
            "pages released after a step would be missing from its stats",
            "none: kvcached is not part of vLLM's stats",
        ),
        Row(
            "metrics.step_with_batch_queue",
            f"{ENGINE_CORE}.step_with_batch_queue",
            "hooks:after_step",
            "the same in asynchronous scheduling",
            "none: kvcached is not part of vLLM's stats",
        ),
        Row(
            "metrics.schedule",
            f"{_SCHEDULER}.schedule",
            "lookups:around_schedule",
            "hits that were lost because no cache had the block any more are not counted",
            *_LOST,
        ),
        Row(
            "metrics.reset",
            f"{_SCHEDULER}.reset_prefix_cache",
            "lookups:around_reset",
            "as metrics.schedule; what an operator resets was not lost",
            *_LOST,
        ),
        Row(
            "metrics.reset_connector",
            f"{_SCHEDULER}.reset_connector_cache",
            "lookups:around_reset_connector",
            "as metrics.reset, for the tiers of a connector",
            *_LOST,
        ),
        Row(
            "metrics.prometheus",
            f"{_METRICS}:KVConnectorProm.__init__",
            "hooks:around_prometheus(self, vllm_config, labelnames, per_engine_labelvalues)",
            "build_prom_metrics belongs to a connector, and does not exist without one",
            _EVERY_CONNECTOR,
            since="0.19",
            earlier=_NO_SERIES,
        ),
        Row(
            "metrics.prometheus_observe",
            f"{_METRICS}:KVConnectorProm.observe",
            "hooks:around_observe(self, transfer_stats_data, engine_idx)",
            "a connector fails on foreign stats",
            _EVERY_CONNECTOR,
            since="0.19",
            earlier=_NO_SERIES,
        ),
        Row(
            "metrics.client_shutdown",
            "vllm.v1.engine.core_client:MPClient.shutdown",
            "hooks:around_client_shutdown",
            "a server that lost its engine ends in order, as one that was asked to stop",
            "none: vLLM logs it",
        ),
        Row(
            "metrics.log",
            f"{_METRICS}:KVConnectorLogging.observe",
            "hooks:around_log(self, transfer_stats_data)",
            "vLLM's logging of connector stats fails if no connector is configured",
            _EVERY_CONNECTOR,
        ),
    ),
)
