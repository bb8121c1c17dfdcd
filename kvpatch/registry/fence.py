"""Rows that hold pages back while a transfer can touch them."""

from __future__ import annotations

from kvpatch.patch import Feature, Patch
from kvpatch.registry.releases import KVCACHED_RANGE, VLLM_RANGE
from kvpatch.registry.targets import ENGINE_CORE, OFFLOADING

_PLANNER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"

FEATURE = Feature(
    name="fence",
    summary="no page is unmapped while a transfer can still touch it",
    vllm=VLLM_RANGE,
    kvcached=KVCACHED_RANGE,
    patches=(
        Patch(
            id="fence.install",
            target=f"{ENGINE_CORE}._kvcached_install_ordered_unmap",
            why="kvcached unmaps a page at its last free, while stores of it are still to run",
            upstream="vllm-project/vllm#48596 (last stores are planned after the free)",
            until="kvcached asks the connector before it unmaps",
            wrapper="kvpatch.fence:around_install",
            parameters=("self",),
            vllm=">=0.21,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="fence.build",
            target=f"{_PLANNER}.build_connector_meta",
            why="the fence must know every transfer that names a block",
            upstream="none: there is no hook between connector and allocator",
            until="kvcached asks the connector before it unmaps",
            wrapper="kvpatch.fence:around_build",
            parameters=("self", "scheduler_output"),
            vllm=">=0.21,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="fence.worker_output",
            target=f"{_PLANNER}.update_connector_output",
            why="the fence must know when a transfer has ended on every worker",
            upstream="none: there is no hook between connector and allocator",
            until="kvcached asks the connector before it unmaps",
            wrapper="kvpatch.fence:around_worker_output",
            parameters=("self", "connector_output"),
            vllm=">=0.21,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="fence.pending_work",
            target=f"{_PLANNER}.has_pending_push_work",
            why="an idle engine would never release the pages that wait for its next step",
            upstream="vllm-project/vllm#45595 (the hook this uses)",
            until="kvcached asks the connector before it unmaps",
            wrapper="kvpatch.fence:around_pending_work",
            parameters=("self",),
            vllm=">=0.24,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="fence.release",
            target="kvcached.kv_cache_manager:KVCacheManager.release_retired_pages_through",
            why="kvcached releases every retired page after one step",
            upstream="ovg-project/kvcached, release_retired_pages_through in 0.1.6",
            until="kvcached asks the connector before it unmaps",
            wrapper="kvpatch.fence:around_release",
            parameters=("self", "marker"),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="fence.step",
            target=f"{ENGINE_CORE}.step",
            why="kvcached releases retired pages only after steps of the batch queue",
            upstream="ovg-project/kvcached, patch_async_batch_lifetime in 0.1.6",
            until="kvcached retires pages in synchronous scheduling too",
            wrapper="kvpatch.fence:after_step",
            parameters=("self",),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="fence.reset",
            target=f"{ENGINE_CORE}.reset_prefix_cache",
            why="an idle engine inside the caller's process is never stepped again",
            upstream="ovg-project/kvcached, patch_async_batch_lifetime in 0.1.6",
            until="kvcached retires pages in synchronous scheduling too",
            wrapper="kvpatch.fence:after_reset",
            parameters=(),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="fence.listener",
            target="kvcached.tp_ipc_util:_sync_before_unmap",
            why="the worker would wait for every copy in flight before any unmap",
            upstream="ovg-project/kvcached, _sync_before_unmap in 0.1.6",
            until="kvcached waits for the compute stream only",
            wrapper="kvpatch.fence:skip_device_wide_wait",
            parameters=(),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
    ),
)
