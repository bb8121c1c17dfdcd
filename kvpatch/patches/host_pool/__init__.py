"""The host pool: engines share host memory for their CPU tiers, and commit it as they need it.

Without ``KVPATCH_HOST_POOL`` none of it is applied. The pool itself is ``kvpatch.pool``.
"""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Patch, Seam, seam
from kvpatch.upstream.targets import ENGINE_CORE, OFFLOADING, SIMPLE, SIMPLE_CONNECTOR

_KV_OFFLOAD = "vllm.v1.kv_offload.cpu"
_MANAGER = f"{_KV_OFFLOAD}.manager:CPUOffloadingManager"
_REGION = f"{_KV_OFFLOAD}.shared_offload_region"
_SCHEDULER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_CODE = "kvpatch.patches.host_pool"
_ISSUE = "vllm-project/vllm#42632 (memory of the tier on demand)"
_NONE = "none: a tier of vLLM has all of its memory, and for itself"
_UNTIL = "vLLM commits the CPU tier's memory as it is needed, and gives it back"
_SINCE = "0.28"


def _row(
    row: str,
    target: str,
    wrapper: str,
    why: str,
    parameters: tuple[str, ...] = ("self",),
    upstream: str = _NONE,
    since: str = _SINCE,
    before: str | None = None,
) -> Patch:
    return Patch(
        id=f"pool.{row}",
        target=target,
        why=why,
        upstream=upstream,
        until=_UNTIL,
        wrapper=f"{_CODE}.{wrapper}",
        parameters=parameters,
        since=since,
        before=before,
    )


def _renamed(row: str, name: str, wrapper: str, why: str, parameters: tuple[str, ...]) -> Seam:
    """Return the seam of a method of the manager that has another name from 0.30 on."""
    old, new = name.format("block"), name.format("chunk")
    return seam(
        _row(row, f"{_MANAGER}.{new}", wrapper, why, parameters, since="0.30"),
        _row(f"{row}_of_blocks", f"{_MANAGER}.{old}", wrapper, why, parameters, before="0.30"),
    )


FEATURE = Feature(
    name="host-pool",
    summary="with `KVPATCH_HOST_POOL`, the CPU tiers of a user's engines share one size of host "
    "memory, which is committed as blocks are stored and given back when they are gone",
    since=_SINCE,
    optional=True,
    wanted=f"{_CODE}.presence:wanted",
    rules=f"{_CODE}.rules:RULES",
    seams=(
        seam(
            _row(
                "engine_core",
                f"{ENGINE_CORE}.__init__",
                "engine:around_engine_core",
                "an engine takes the whole tier, whatever other engines have",
                ("vllm_config",),
            ),
        ),
        seam(
            _row(
                "shutdown",
                f"{ENGINE_CORE}.shutdown",
                "engine:around_shutdown",
                "the part of an engine that is shut down would count until its process ends",
            ),
        ),
        seam(
            _row(
                "reset",
                f"{ENGINE_CORE}.reset_prefix_cache",
                "engine:after_reset",
                "a reset tier keeps its memory",
            ),
        ),
        seam(
            _row(
                "region",
                f"{_REGION}:SharedOffloadRegion.__init__",
                "region:around_region",
                "the file of the tier is its first worker's, and as large as the tier",
                ("self", "engine_id", "rank"),
                _ISSUE,
            ),
        ),
        seam(
            _row(
                "populate",
                f"{_REGION}:_get_populate_write_fn",
                "region:around_populate",
                "all of the tier is written before the engine is ready",
                ("mmap_obj",),
                _ISSUE,
            ),
        ),
        seam(
            _row(
                "pin",
                f"{_KV_OFFLOAD}.gpu_worker:pin_mmap_region",
                "region:around_pin",
                "all of the tier is registered with the device before the engine is ready",
                ("region",),
                _ISSUE,
            ),
        ),
        seam(
            _row(
                "cleanup",
                f"{_REGION}:SharedOffloadRegion.cleanup",
                "region:around_cleanup",
                "it deregisters the tier as a whole, or in the parts that vLLM registered",
            ),
        ),
        _renamed(
            "free_count",
            "_get_num_free_{}s",
            "tier:around_free_count",
            "every chunk of the tier counts as memory",
            ("self",),
        ),
        _renamed(
            "allocate",
            "_allocate_{}s",
            "tier:around_allocate",
            "chunks are handed out wherever one is free, so that no range becomes empty",
            ("self", "keys"),
        ),
        _renamed(
            "free",
            "_free_{}",
            "tier:around_free",
            "a free chunk is known to its manager alone",
            ("self",),
        ),
        seam(
            _row(
                "prepare_store",
                f"{_MANAGER}.prepare_store",
                "tier:around_prepare_store",
                "blocks would be evicted although memory can be committed",
                ("self", "keys"),
            ),
        ),
        seam(
            _row(
                "lookup",
                "vllm.v1.kv_offload.tiering.manager:TieringOffloadingManager.lookup",
                "tier:around_lookup",
                "a block on a disk would be computed although memory for it can be committed",
                ("self", "key", "req_context"),
            ),
        ),
        seam(
            _row(
                "prepare_load",
                f"{_MANAGER}.prepare_load",
                "tier:around_prepare_load",
                "nobody knows which ranges of the tier are in use",
                ("self", "keys"),
            ),
        ),
        seam(
            _row(
                "touch",
                f"{_MANAGER}.touch",
                "tier:around_touch",
                "as pool.prepare_load",
                ("self", "keys"),
            ),
        ),
        seam(
            _row(
                "complete_load",
                f"{_MANAGER}.complete_load",
                "tier:around_completion",
                "a block in a range that has to go would stay when its transfer ends",
                ("self", "keys"),
            ),
        ),
        seam(
            _row(
                "complete_store",
                f"{_MANAGER}.complete_store",
                "tier:around_completion",
                "as pool.complete_load",
                ("self", "keys"),
            ),
        ),
        seam(
            _row(
                "reset_tier",
                f"{_MANAGER}.reset_cache",
                "tier:around_reset",
                "it frees every chunk at once",
            ),
        ),
        seam(
            _row(
                "events",
                f"{_MANAGER}.take_events",
                "tier:around_events",
                "events of blocks that are evicted for another engine would be lost",
            ),
        ),
        seam(
            _row(
                "schedule",
                "vllm.v1.core.sched.scheduler:Scheduler.schedule",
                "tier:around_schedule",
                "a block that a step has found would be evicted for another engine before it is "
                "loaded",
            ),
        ),
        seam(
            _row(
                "build",
                f"{_SCHEDULER}.build_connector_meta",
                "tier:around_build",
                "memory that a transfer touches must not be given back",
                ("self", "scheduler_output"),
            ),
        ),
        seam(
            _row(
                "worker_output",
                f"{_SCHEDULER}.update_connector_output",
                "tier:around_worker_output",
                "as pool.build: it tells when a transfer has ended on every worker",
                ("self", "connector_output"),
            ),
        ),
        seam(
            _row(
                "pending_work",
                f"{_SCHEDULER}.has_pending_push_work",
                "tier:around_pending_work",
                "after a reset an idle engine would not hear of the end of its transfers",
            ),
        ),
        seam(
            _row(
                "simple_tensors",
                f"{SIMPLE}.worker:SimpleCPUOffloadWorker._init_cpu_mode",
                "simple_region:around_tensors",
                "all of SimpleCPUOffloadConnector's tier is written and registered before the "
                "engine is ready",
                ("self", "unique_gpu_caches", "total_bytes_per_block", "device"),
                _ISSUE,
            ),
        ),
        seam(
            _row(
                "simple_shutdown",
                f"{SIMPLE_CONNECTOR}.shutdown",
                "simple_region:around_shutdown",
                "nobody would deregister the extents of SimpleCPUOffloadConnector's tier",
            ),
        ),
        seam(
            _row(
                "simple_reset",
                f"{SIMPLE}.manager:SimpleCPUOffloadScheduler.reset",
                "simple:around_reset",
                "blocks without memory would count as used, and no tier would be reset",
            ),
        ),
        seam(
            Gap(_SINCE, "0.31", "the connector counts nothing there"),
            _row(
                "simple_stats",
                f"{SIMPLE}.manager:SimpleCPUOffloadScheduler.get_stats",
                "simple:around_count",
                "blocks without memory would be shown as used",
                since="0.31",
            ),
        ),
        seam(
            _row(
                "update",
                "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
                "simple:around_locked",
                "a block of SimpleCPUOffloadConnector would be evicted for another engine while "
                "vLLM looks at it",
            ),
        ),
        seam(
            _row(
                "finish",
                "vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
                "simple:around_locked",
                "as pool.update",
            ),
        ),
    ),
)
