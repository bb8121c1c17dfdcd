"""Metrics: ``kvpatch status`` and the ``vllm:kvpatch_`` series of vLLM's ``/metrics``."""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Patch, seam
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import ENGINE_CORE

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_HOOKS = "kvpatch.patches.metrics.hooks"
_LOOKUPS = "kvpatch.patches.metrics.lookups"
_UNTIL = "kvcached and its connectors report to vLLM's stats themselves"
_NO_SERIES = Gap(FLOOR, "0.19", "vLLM has no metrics of KV connectors to extend")

FEATURE = Feature(
    name="metrics",
    summary="`kvpatch status` and `/metrics` show what the engine maps, holds, stores and loads",
    since=FLOOR,
    seams=(
        Patch(
            id="observing.engine_core",
            target=f"{ENGINE_CORE}.__init__",
            why="the state of the engine is not visible outside the process",
            upstream="ovg-project/kvcached#316 (is it on in this process?)",
            until=_UNTIL,
            wrapper=f"{_HOOKS}:around_engine_core",
            parameters=("self", "vllm_config"),
            since="0.16",
        ),
        Patch(
            id="observing.make_stats",
            target=f"{_SCHEDULER}.make_stats",
            why="stored, loaded and hit counts are sent per step and not accumulated",
            upstream="none: the connector's stats are its own",
            until=_UNTIL,
            wrapper=f"{_HOOKS}:around_make_stats",
            parameters=("self", "spec_decoding_stats", "kv_connector_stats"),
            since="0.16",
        ),
        Patch(
            id="observing.step",
            target=f"{ENGINE_CORE}.step",
            why="pages released after a step would be missing from its stats",
            upstream="none: kvcached is not part of vLLM's stats",
            until=_UNTIL,
            wrapper=f"{_HOOKS}:after_step",
            parameters=("self",),
            since="0.16",
        ),
        Patch(
            id="observing.step_with_batch_queue",
            target=f"{ENGINE_CORE}.step_with_batch_queue",
            why="the same in asynchronous scheduling",
            upstream="none: kvcached is not part of vLLM's stats",
            until=_UNTIL,
            wrapper=f"{_HOOKS}:after_step",
            parameters=("self",),
            since="0.16",
        ),
        Patch(
            id="observing.schedule",
            target=f"{_SCHEDULER}.schedule",
            why="hits that were lost because no cache had the block any more are not counted",
            upstream="none: vLLM's stats have the hits, and not what was had before",
            until="vLLM's stats say how many tokens were computed again",
            wrapper=f"{_LOOKUPS}:around_schedule",
            parameters=("self",),
            since="0.16",
        ),
        Patch(
            id="observing.reset",
            target=f"{_SCHEDULER}.reset_prefix_cache",
            why="as observing.schedule; what an operator resets was not lost",
            upstream="none: vLLM's stats have the hits, and not what was had before",
            until="vLLM's stats say how many tokens were computed again",
            wrapper=f"{_LOOKUPS}:around_reset",
            parameters=("self",),
            since="0.16",
        ),
        Patch(
            id="observing.reset_connector",
            target=f"{_SCHEDULER}.reset_connector_cache",
            why="as observing.reset, for the tiers of a connector",
            upstream="none: vLLM's stats have the hits, and not what was had before",
            until="vLLM's stats say how many tokens were computed again",
            wrapper=f"{_LOOKUPS}:around_reset_connector",
            parameters=("self",),
            since="0.16",
        ),
        seam(
            Patch(
                id="observing.prometheus",
                target=f"{_METRICS}:KVConnectorProm.__init__",
                why="build_prom_metrics belongs to a connector, and does not exist without one",
                upstream="vllm-project/vllm#57251 (metrics for every connector)",
                until=_UNTIL,
                wrapper=f"{_HOOKS}:around_prometheus",
                parameters=("self", "vllm_config", "labelnames", "per_engine_labelvalues"),
                since="0.19",
            ),
            _NO_SERIES,
        ),
        seam(
            Patch(
                id="observing.prometheus_observe",
                target=f"{_METRICS}:KVConnectorProm.observe",
                why="a connector fails on foreign stats",
                upstream="vllm-project/vllm#57251 (metrics for every connector)",
                until=_UNTIL,
                wrapper=f"{_HOOKS}:around_observe",
                parameters=("self", "transfer_stats_data", "engine_idx"),
                since="0.19",
            ),
            _NO_SERIES,
        ),
        Patch(
            id="observing.log",
            target=f"{_METRICS}:KVConnectorLogging.observe",
            why="vLLM's logging of connector stats fails if no connector is configured",
            upstream="vllm-project/vllm#57251 (metrics for every connector)",
            until=_UNTIL,
            wrapper=f"{_HOOKS}:around_log",
            parameters=("self", "transfer_stats_data"),
            since="0.16",
        ),
    ),
)
