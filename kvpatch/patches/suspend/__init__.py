"""Suspend and resume: an idle model's KV leaves the device, and nothing is lost."""

from __future__ import annotations

from kvpatch.patch import Feature, Patch, Seam
from kvpatch.patches.suspend.releases import SINCE
from kvpatch.upstream.targets import ENGINE_CORE, OFFLOADING, SIMPLE

_PROC = "vllm.v1.engine.core:EngineCoreProc"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_HOOKS = "kvpatch.patches.suspend.hooks"
_UNTIL = "vLLM stores what only the device has before it gives a KV cache's memory back"
_SIMPLE_STORES = f"{SIMPLE}.manager:SimpleCPUOffloadScheduler.prepare_store_specs"
_SIMPLE_WHY = "the connector stores blocks of requests, or those about to be evicted"
_ASKED = "vllm-project/vllm#57810 (sleep that keeps the connector's cache)"

FEATURE = Feature(
    name="suspend",
    summary="`kvpatch suspend` stores what only the device has and gives its memory back; "
    "`kvpatch resume` takes it again",
    since=SINCE,
    optional=True,
    rules="kvpatch.patches.suspend.rules:RULES",
    seams=(
        Patch(
            id="suspend.engine",
            target=f"{ENGINE_CORE}.__init__",
            why="nobody outside of an engine can tell it to give its memory back",
            upstream=_ASKED,
            until=_UNTIL,
            wrapper=f"{_HOOKS}:around_engine_start",
            parameters=("self", "vllm_config"),
            since=SINCE,
        ),
        Patch(
            id="suspend.engine_end",
            target=f"{ENGINE_CORE}.shutdown",
            why="the socket of an engine that has ended must not stay",
            upstream="none: the socket is kvpatch's",
            until=_UNTIL,
            wrapper=f"{_HOOKS}:before_engine_shutdown",
            parameters=("self",),
            since=SINCE,
        ),
        Patch(
            id="suspend.question",
            target=f"{_PROC}._handle_client_request",
            why="only the engine's own thread may touch its scheduler, and an idle one waits for "
            "its clients",
            upstream="none: a utility call answers a client of vLLM's",
            until=_UNTIL,
            wrapper=f"{_HOOKS}:around_client_request",
            parameters=("self", "request_type", "request"),
            since=SINCE,
        ),
        Patch(
            id="suspend.step",
            target=f"{_PROC}._process_engine_step",
            why="a suspension takes several steps of the engine",
            upstream=_ASKED,
            until=_UNTIL,
            wrapper=f"{_HOOKS}:after_engine_step",
            parameters=("self",),
            since=SINCE,
        ),
        Patch(
            id="suspend.has_requests",
            target=f"{_SCHEDULER}.has_requests",
            why="an engine whose requests wait is not stepped, and copies are reported in steps",
            upstream="vllm-project/vllm#45595 (the hook for connectors)",
            until=_UNTIL,
            wrapper=f"{_HOOKS}:around_has_requests",
            parameters=("self",),
            since=SINCE,
        ),
        Patch(
            id="suspend.pause_state",
            target=f"{_SCHEDULER}.set_pause_state",
            why="`/resume` of vLLM would run requests on an engine that has no memory",
            upstream="none: with memory of fixed size a paused engine has all of it",
            until=_UNTIL,
            wrapper=f"{_HOOKS}:around_pause_state",
            parameters=("self", "pause_state"),
            since=SINCE,
        ),
        Patch(
            id="suspend.limit",
            target="kvcached.kv_cache_manager:KVCacheManager.resize",
            why="a lower limit evicts blocks that only the device has",
            upstream="ovg-project/kvcached, KVCacheManager._alloc in 0.1.6",
            until="kvcached consults the connector before evicting",
            wrapper="kvpatch.patches.suspend.giving:around_resize",
            parameters=("self", "new_mem_size"),
            since=SINCE,
        ),
        Patch(
            id="suspend.offloading_stores",
            target=f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler._build_store_jobs",
            why="the connector stores blocks of requests only, and of those not all",
            upstream=_ASKED,
            until=_UNTIL,
            wrapper="kvpatch.patches.suspend.offloading:around_store_jobs",
            parameters=("self", "scheduler_output"),
            since=SINCE,
        ),
        Seam(
            (
                Patch(
                    id="suspend.simple_stores_without_events",
                    target=_SIMPLE_STORES,
                    why=_SIMPLE_WHY,
                    upstream=_ASKED,
                    until=_UNTIL,
                    wrapper="kvpatch.patches.suspend.legacy:around_store_specs",
                    parameters=("self", "scheduler_output"),
                    since=SINCE,
                    before="0.30",
                ),
                Patch(
                    id="suspend.simple_stores",
                    target=_SIMPLE_STORES,
                    why=_SIMPLE_WHY,
                    upstream=_ASKED,
                    until=_UNTIL,
                    wrapper="kvpatch.patches.suspend.simple:around_store_specs",
                    parameters=("self", "scheduler_output"),
                    since="0.30",
                ),
            )
        ),
    ),
)
