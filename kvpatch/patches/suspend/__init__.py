"""Suspend and resume: an idle model's KV leaves the device, and nothing is lost.

A verb, such as a limit, reaches an engine so: ``cli`` and ``kvpatch.set_limit`` call
``control.client``, which writes a line to the engine's socket; ``server`` reads it on a thread of
its own, hands it over through vLLM's queue of client requests and takes it on the engine's thread,
where ``suspension`` does it. A limit goes on to kvcached's pool and to ``KVCacheManager.resize``
(``upstream.kvcached_api.set_limit``), before which ``giving`` stores what has to leave the device.
"""

from __future__ import annotations

from kvpatch.rows import Row, feature, seam
from kvpatch.upstream.targets import ENGINE_CORE, OFFLOADING, SIMPLE

_PROC = "vllm.v1.engine.core:EngineCoreProc"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_SINCE = "0.28"
_UNTIL = "vLLM stores what only the device has before it gives a KV cache's memory back"

_ASKED = "vllm-project/vllm#57810 (sleep that keeps the connector's cache)"

FEATURE = feature(
    __name__,
    summary="`kvpatch suspend` stores what only the device has and gives its memory back; "
    "`kvpatch resume` takes it again",
    since=_SINCE,
    upstream=_ASKED,
    until=_UNTIL,
    rules="rules:RULES",
    optional=True,
    seams=(
        Row(
            "suspend.engine",
            f"{ENGINE_CORE}.__init__",
            "hooks:around_engine_start(self, vllm_config)",
            "nobody outside of an engine can tell it to give its memory back",
        ),
        Row(
            "suspend.engine_end",
            f"{ENGINE_CORE}.shutdown",
            "hooks:before_engine_shutdown",
            "the socket of an engine that has ended must not stay",
            "none: the socket is kvpatch's",
        ),
        Row(
            "suspend.question",
            f"{_PROC}._handle_client_request",
            "server:around_client_request(self, request_type, request)",
            "only the engine's own thread may touch its scheduler, and an idle one waits for "
            "its clients",
            "none: a utility call answers a client of vLLM's",
        ),
        Row(
            "suspend.step",
            f"{_PROC}._process_engine_step",
            "hooks:after_engine_step",
            "a suspension takes several steps of the engine",
        ),
        Row(
            "suspend.has_requests",
            f"{_SCHEDULER}.has_requests",
            "hooks:around_has_requests",
            "an engine whose requests wait is not stepped, and copies are reported in steps",
            "vllm-project/vllm#45595 (the hook for connectors)",
        ),
        Row(
            "suspend.pause_state",
            f"{_SCHEDULER}.set_pause_state",
            "hooks:around_pause_state(self, pause_state)",
            "`/resume` of vLLM would run requests on an engine that has no memory",
            "none: with memory of fixed size a paused engine has all of it",
        ),
        Row(
            "suspend.limit",
            "kvcached.kv_cache_manager:KVCacheManager.resize",
            "giving:around_resize(self, new_mem_size)",
            "a lower limit evicts blocks that only the device has",
            "ovg-project/kvcached, KVCacheManager._alloc in 0.1.6",
            "kvcached consults the connector before evicting",
        ),
        Row(
            "suspend.revision",
            "kvcached.kv_cache_manager:KVCacheManager.set_memory_limit",
            "giving:around_memory_limit(self, limit_bytes, revision)",
            "a limit by revision is called applied, and the next allocation applies that of "
            "/dev/shm",
            "ovg-project/kvcached#414, KVCacheManager._alloc in 0.1.6",
            "kvcached writes the limit to its pool in /dev/shm as well",
        ),
        Row(
            "suspend.offloading_stores",
            f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler._build_store_jobs",
            "offloading:around_store_jobs(self, scheduler_output)",
            "the connector stores blocks of requests only, and of those not all",
        ),
        seam(
            Row(
                "suspend.simple_stores",
                f"{SIMPLE}.manager:SimpleCPUOffloadScheduler.prepare_store_specs",
                "simple:around_store_specs(self, scheduler_output)",
                "the connector stores blocks of requests, or those about to be evicted",
                until=_UNTIL,
                since="0.30",
            ),
            Row("suspend.simple_stores_without_events", wrapper="fixes:around_store_specs"),
        ),
    ),
)
