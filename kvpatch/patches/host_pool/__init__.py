"""The host pool: engines share host memory for their CPU tiers, and commit it as they need it."""

from __future__ import annotations

from kvpatch.rows import Row, feature, seam
from kvpatch.upstream.targets import ENGINE_CORE, OFFLOADING, SIMPLE, SIMPLE_CONNECTOR

_KV_OFFLOAD = "vllm.v1.kv_offload.cpu"
_MANAGER = f"{_KV_OFFLOAD}.manager:CPUOffloadingManager"
_REGION = f"{_KV_OFFLOAD}.shared_offload_region"
_SCHEDULER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_ISSUE = "vllm-project/vllm#42632 (memory of the tier on demand)"
_NONE = "none: a tier of vLLM has all of its memory, and for itself"
_UNTIL = "vLLM commits the CPU tier's memory as it is needed, and gives it back"
_SINCE = "0.28"


FEATURE = feature(
    __name__,
    summary="with `KVPATCH_HOST_POOL`, the CPU tiers of a user's engines share one size of host "
    "memory, which is committed as blocks are stored and given back when they are gone",
    since=_SINCE,
    upstream=_NONE,
    until=_UNTIL,
    wanted="presence:wanted",
    rules="rules:RULES",
    optional=True,
    seams=(
        Row(
            "host_pool.engine_core",
            f"{ENGINE_CORE}.__init__",
            "engine:around_engine_core(vllm_config)",
            "an engine takes the whole tier, whatever other engines have",
        ),
        Row(
            "host_pool.shutdown",
            f"{ENGINE_CORE}.shutdown",
            "engine:around_shutdown",
            "the part of an engine that is shut down would count until its process ends",
        ),
        Row(
            "host_pool.reset",
            f"{ENGINE_CORE}.reset_prefix_cache",
            "engine:after_reset",
            "a reset tier keeps its memory",
        ),
        Row(
            "host_pool.region",
            f"{_REGION}:SharedOffloadRegion.__init__",
            "region:around_region(self, engine_id, rank)",
            "the file of the tier is its first worker's, and as large as the tier",
            _ISSUE,
        ),
        Row(
            "host_pool.populate",
            f"{_REGION}:_get_populate_write_fn",
            "region:around_populate(mmap_obj)",
            "all of the tier is written before the engine is ready",
            _ISSUE,
        ),
        Row(
            "host_pool.pin",
            f"{_KV_OFFLOAD}.gpu_worker:pin_mmap_region",
            "region:around_pin(region)",
            "all of the tier is registered with the device before the engine is ready",
            _ISSUE,
        ),
        Row(
            "host_pool.cleanup",
            f"{_REGION}:SharedOffloadRegion.cleanup",
            "region:around_cleanup",
            "it deregisters the tier as a whole, or in the parts that vLLM registered",
        ),
        seam(
            Row(
                "host_pool.free_count",
                f"{_MANAGER}._get_num_free_chunks",
                "tier:around_free_count",
                "every chunk of the tier counts as memory",
                since="0.30",
            ),
            Row("host_pool.free_count_of_blocks", f"{_MANAGER}._get_num_free_blocks"),
        ),
        seam(
            Row(
                "host_pool.allocate",
                f"{_MANAGER}._allocate_chunks",
                "tier:around_allocate(self, keys)",
                "chunks are handed out wherever one is free, so that no range becomes empty",
                since="0.30",
            ),
            Row("host_pool.allocate_of_blocks", f"{_MANAGER}._allocate_blocks"),
        ),
        seam(
            Row(
                "host_pool.free",
                f"{_MANAGER}._free_chunk",
                "tier:around_free",
                "a free chunk is known to its manager alone",
                since="0.30",
            ),
            Row("host_pool.free_of_blocks", f"{_MANAGER}._free_block"),
        ),
        Row(
            "host_pool.prepare_store",
            f"{_MANAGER}.prepare_store",
            "tier:around_prepare_store(self, keys)",
            "blocks would be evicted although memory can be committed",
        ),
        Row(
            "host_pool.lookup",
            "vllm.v1.kv_offload.tiering.manager:TieringOffloadingManager.lookup",
            "tier:around_lookup(self, key, req_context)",
            "a block on a disk would be computed although memory for it can be committed",
        ),
        Row(
            "host_pool.prepare_load",
            f"{_MANAGER}.prepare_load",
            "tier:around_prepare_load(self, keys)",
            "nobody knows which ranges of the tier are in use",
        ),
        Row(
            "host_pool.touch",
            f"{_MANAGER}.touch",
            "tier:around_touch(self, keys)",
            "as host_pool.prepare_load",
        ),
        Row(
            "host_pool.complete_load",
            f"{_MANAGER}.complete_load",
            "tier:around_completion(self, keys)",
            "a block in a range that has to go would stay when its transfer ends",
        ),
        Row(
            "host_pool.complete_store",
            f"{_MANAGER}.complete_store",
            "tier:around_completion(self, keys)",
            "as host_pool.complete_load",
        ),
        Row(
            "host_pool.reset_tier",
            f"{_MANAGER}.reset_cache",
            "tier:around_reset",
            "it frees every chunk at once",
        ),
        Row(
            "host_pool.events",
            f"{_MANAGER}.take_events",
            "tier:around_events",
            "events of blocks that are evicted for another engine would be lost",
        ),
        Row(
            "host_pool.schedule",
            "vllm.v1.core.sched.scheduler:Scheduler.schedule",
            "tier:around_schedule",
            "a block that a step has found would be evicted for another engine before it is loaded",
        ),
        Row(
            "host_pool.build",
            f"{_SCHEDULER}.build_connector_meta",
            "tier:around_build(self, scheduler_output)",
            "memory that a transfer touches must not be given back",
        ),
        Row(
            "host_pool.worker_output",
            f"{_SCHEDULER}.update_connector_output",
            "tier:around_worker_output(self, connector_output)",
            "as host_pool.build: it tells when a transfer has ended on every worker",
        ),
        Row(
            "host_pool.pending_work",
            f"{_SCHEDULER}.has_pending_push_work",
            "tier:around_pending_work",
            "after a reset an idle engine would not hear of the end of its transfers",
        ),
        Row(
            "host_pool.simple_tensors",
            f"{SIMPLE}.worker:SimpleCPUOffloadWorker._init_cpu_mode",
            "simple_region:around_tensors(self, unique_gpu_caches, total_bytes_per_block, device)",
            "all of SimpleCPUOffloadConnector's tier is written and registered before the engine "
            "is ready",
            _ISSUE,
        ),
        Row(
            "host_pool.simple_shutdown",
            f"{SIMPLE_CONNECTOR}.shutdown",
            "simple_region:around_shutdown",
            "nobody would deregister the extents of SimpleCPUOffloadConnector's tier",
        ),
        Row(
            "host_pool.simple_reset",
            f"{SIMPLE}.manager:SimpleCPUOffloadScheduler.reset",
            "simple:around_reset",
            "blocks without memory would count as used, and no tier would be reset",
        ),
        Row(
            "host_pool.simple_stats",
            f"{SIMPLE}.manager:SimpleCPUOffloadScheduler.get_stats",
            "simple:around_count",
            "blocks without memory would be shown as used",
            since="0.31",
            earlier="the connector counts nothing there",
        ),
        Row(
            "host_pool.update",
            "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
            "simple:around_locked",
            "a block of SimpleCPUOffloadConnector would be evicted for another engine while vLLM "
            "looks at it",
        ),
        Row(
            "host_pool.finish",
            "vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
            "simple:around_locked",
            "as host_pool.update",
        ),
    ),
)
