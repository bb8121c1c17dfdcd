"""The fence: no page is unmapped while a transfer can still touch it."""

from __future__ import annotations

from kvpatch.rows import Row, feature, gap, seam
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import ENGINE_CORE, OFFLOADING

_SCHEDULER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_IN_ONE_MODULE = f"{OFFLOADING}_connector"  # up to 0.18
_CONSULTS = "kvcached consults the connector before unmapping"
_NO_WINDOWS = "windows are full attention, or all of them and refused (KVP423)"

FEATURE = feature(
    __name__,
    summary="no page is unmapped while a transfer can still touch it",
    since=FLOOR,
    upstream="none: there is no hook between connector and allocator",
    seams=(
        Row(
            "fence.install",
            f"{ENGINE_CORE}._kvcached_install_ordered_unmap",
            "hooks:around_install",
            "kvcached unmaps a page when its last block is freed, before pending stores of it",
            "vllm-project/vllm#48596 (last stores are planned after the free)",
            _CONSULTS,
        ),
        seam(
            Row(
                "fence.build",
                f"{_SCHEDULER}.build_connector_meta",
                "hooks:around_build(self, scheduler_output)",
                "the fence must track every transfer that references a block",
                until=_CONSULTS,
                since="0.25",
            ),
            Row(
                "fence.build_of_pairs",
                wrapper="legacy:around_build_of_pairs",
                but="a transfer is a pair of specs",
                since="0.21",
            ),
            Row(
                "fence.build_by_request",
                wrapper="legacy:around_build_by_request",
                but="a transfer belongs to a request and has no id",
                since="0.19",
            ),
            Row("fence.build_by_request_in_one_module", f"{_IN_ONE_MODULE}:"),
        ),
        seam(
            Row(
                "fence.worker_output",
                f"{_SCHEDULER}.update_connector_output",
                "hooks:around_worker_output(self, connector_output)",
                "the fence must track when a transfer has completed on every worker",
                until=_CONSULTS,
                since="0.21",
            ),
            Row(
                "fence.worker_output_by_request",
                wrapper="legacy:around_worker_output_by_request",
                but="a request's stores are reported together",
                since="0.19",
            ),
            Row("fence.worker_output_by_request_in_one_module", f"{_IN_ONE_MODULE}:"),
        ),
        seam(
            Row(
                "fence.pending_work",
                f"{_SCHEDULER}.has_pending_push_work",
                "hooks:around_pending_work",
                "an idle engine would never release pages that are held until its next step",
                "vllm-project/vllm#45595 (the hook used here)",
                _CONSULTS,
                since="0.24",
            ),
            Row(
                "fence.has_requests",
                "vllm.v1.core.sched.scheduler:Scheduler.has_requests",
                "legacy:around_has_requests",
                but="a connector cannot request steps",
                upstream="vllm-project/vllm#45595 (the hook added in 0.24)",
                since="0.21",
            ),
            Row(
                "fence.has_requests_by_request",
                wrapper="legacy:around_has_requests_by_request",
                why="as fence.has_requests; a finished request keeps its blocks until it is stored",
            ),
        ),
        Row(
            "fence.window_blocks",
            f"{_SCHEDULER}.build_connector_meta",
            "legacy:before_build(self, scheduler_output)",
            "a block that left a sliding window is stored after its reallocation",
            "vllm-project/vllm, _build_store_jobs in 0.23",
            since="0.21",
            earlier=_NO_WINDOWS,
            later=("0.23", "vLLM drops the id of a block that is reallocated"),
        ),
        seam(
            Row(
                "fence.window_blocks_of_reset",
                f"{_SCHEDULER}.reset_cache",
                "hooks:after_reset_of_tier",
                "after a reset, blocks that left a window are stored with the bytes of others",
                "vllm-project/vllm, OffloadingConnectorScheduler.reset_cache",
                "a reset drops the ids of blocks that have left a window",
                since="0.23",
            ),
            gap("fence.window_blocks drops them before every store", since="0.21"),
            gap(_NO_WINDOWS),
        ),
        Row(
            "fence.step_output",
            "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
            "legacy:around_step_output(self, scheduler_output)",
            "stores of a preempted request are not reported; the workers wait for them",
            later=("0.21", "every transfer has an id and is reported"),
        ),
        Row(
            "fence.release",
            "kvcached.kv_cache_manager:KVCacheManager.release_retired_pages_through",
            "hooks:around_release(self, marker)",
            "kvcached releases every retired page after one step",
            "ovg-project/kvcached, release_retired_pages_through in 0.1.6",
            _CONSULTS,
        ),
        Row(
            "fence.step",
            f"{ENGINE_CORE}.step",
            "hooks:after_step",
            "kvcached releases retired pages only after steps with the batch queue",
            "ovg-project/kvcached, patch_async_batch_lifetime in 0.1.6",
            "kvcached retires pages in synchronous scheduling too",
        ),
        Row(
            "fence.reset",
            f"{ENGINE_CORE}.reset_prefix_cache",
            "hooks:after_reset()",
            "an idle engine in the caller's process is not stepped again",
            "ovg-project/kvcached, patch_async_batch_lifetime in 0.1.6",
            "kvcached retires pages in synchronous scheduling too",
        ),
        Row(
            "fence.listener",
            "kvcached.tp_ipc_util:_sync_before_unmap",
            "hooks:skip_device_wide_wait",
            "the worker would wait for every copy in flight before any unmap",
            "ovg-project/kvcached, _sync_before_unmap in 0.1.6",
            "kvcached waits for the compute stream only",
        ),
    ),
)
