"""The table: every feature and patch of kvpatch, and nothing else.

docs/patches.md and docs/support.md are generated from it by scripts/docs.
"""

from __future__ import annotations

from kvpatch.patch import Feature, Kind, Patch

VLLM_RANGE = "==0.28.0"
KVCACHED_RANGE = "==0.1.6"

_V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_ENGINE_CORE = "vllm.v1.engine.core:EngineCore"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_PLANNER = f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_INTERFACES = "kvcached.integration.vllm.interfaces"

ELASTIC = Feature(
    name="elastic-memory",
    summary="kvcached's elastic KV memory is really in use, or vLLM does not start",
    vllm=VLLM_RANGE,
    kvcached=KVCACHED_RANGE,
    patches=(
        Patch(
            id="elastic.config",
            target="vllm.config.vllm:VllmConfig.__post_init__",
            why="configurations nobody tested start and give wrong tokens or die later",
            upstream="ovg-project/kvcached#361 (reviewers ask for stated fallback conditions)",
            until="kvcached states and checks the configurations it supports",
            wrapper="kvpatch.configuration:around_post_init",
            parameters=("self",),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="elastic.worker_setup_error",
            target=f"{_V1_RUNNER}._init_kvcached",
            why="kvcached logs the error of a failed worker set-up and drops it",
            upstream="ovg-project/kvcached, patch_model_runner_init in 0.1.6",
            until="kvcached raises instead of logging 'disabling'",
            wrapper="kvpatch.allocation:remember_setup_error",
            parameters=("self",),
            vllm=">=0.12,<0.29",
            kvcached="==0.1.6",
        ),
        Patch(
            id="elastic.worker_setup",
            target=f"{_V1_RUNNER}.__init__",
            why="after a failed set-up the engine starts half patched and dies later",
            upstream="ovg-project/kvcached, patch_model_runner_init in 0.1.6",
            until="kvcached raises instead of logging 'disabling'",
            wrapper="kvpatch.allocation:require_setup",
            parameters=(),
            vllm=">=0.12,<0.29",
            kvcached="==0.1.6",
        ),
        Patch(
            id="elastic.coordinator",
            target="vllm.v1.core.kv_cache_coordinator:"
            "KVCacheCoordinator._setup_kvcached_coordinator",
            why="kvcached falls back to vLLM's own block pool with a warning",
            upstream="ovg-project/kvcached, KVCacheCoordinatorPatch in 0.1.6",
            until="kvcached raises every error of its coordinator set-up",
            wrapper="kvpatch.allocation:require_coordinator",
            parameters=("self",),
            vllm=">=0.12,<0.31",
            kvcached="==0.1.6",
        ),
        Patch(
            id="elastic.kv_cache_tensors",
            target=f"{_V1_RUNNER}.initialize_kv_cache_tensors",
            why="nothing tells KV caches on kvcached's memory from others",
            upstream="ovg-project/kvcached#269 (elastic memory silently bypassed)",
            until="kvcached refuses KV caches it did not allocate",
            wrapper="kvpatch.status:around_kv_cache_tensors",
            parameters=("self", "kv_cache_config"),
            vllm=">=0.26,<0.29",
            kvcached="==0.1.6",
        ),
        Patch(
            id="elastic.engine_core",
            target=f"{_ENGINE_CORE}.__init__",
            why="nothing tells an engine on kvcached's block pool from one on vLLM's own",
            upstream="ovg-project/kvcached#316 (is it on in this process?)",
            until="kvcached refuses to run without its own block pool",
            wrapper="kvpatch.status:around_engine_core",
            parameters=("self", "vllm_config"),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
    ),
)

OFFLOADING = Feature(
    name="offloading-connector",
    summary="vLLM's OffloadingConnector copies the right bytes of kvcached's memory",
    vllm=VLLM_RANGE,
    kvcached=KVCACHED_RANGE,
    patches=(
        Patch(
            id="offloading.use_uniform_kv_cache",
            target="vllm.v1.worker.kv_connector_model_runner_mixin:"
            "KVConnectorModelRunnerMixin.use_uniform_kv_cache",
            why="a cross-layer KV cache is one torch.zeros that bypasses kvcached's memory",
            upstream="ovg-project/kvcached#269, ovg-project/kvcached#361",
            until="kvcached allocates cross-layer KV caches itself, or vLLM 0.29 (path removed)",
            wrapper="kvpatch.allocation:keep_elastic",
            parameters=("attn_groups",),
            vllm=">=0.12,<0.29",
            kvcached="==0.1.6",
        ),
        Patch(
            id="offloading.register_kv_caches",
            target=f"{_OFFLOADING}.worker:OffloadingConnectorWorker.register_kv_caches",
            why="vLLM registers a dense tensor a layer, so other blocks' bytes are copied",
            upstream="ovg-project/kvcached#361 (asks to keep the cross-layer speed)",
            until="the connector asks the allocator for its regions",
            wrapper="kvpatch.geometry:register_regions",
            parameters=("self", "kv_caches"),
            vllm=">=0.25,<0.29",
            kvcached="==0.1.6",
        ),
    ),
)

FENCE = Feature(
    name="fence",
    summary="no page is unmapped while a transfer can still touch it",
    vllm=VLLM_RANGE,
    kvcached=KVCACHED_RANGE,
    patches=(
        Patch(
            id="fence.install",
            target=f"{_ENGINE_CORE}._kvcached_install_ordered_unmap",
            why="kvcached unmaps a page at its last free, while stores of it are still to run",
            upstream="vllm-project/vllm#48596 (last stores are planned after the free)",
            until="kvcached asks the connector before it unmaps",
            wrapper="kvpatch.fence:around_install",
            parameters=("self",),
            vllm=">=0.21,<0.31",
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
            target=f"{_ENGINE_CORE}.step",
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
            target=f"{_ENGINE_CORE}.reset_prefix_cache",
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

HOST_DEVICE = Feature(
    name="host-device",
    summary="kvcached's real allocator runs on ordinary memory, on machines without a GPU",
    vllm=VLLM_RANGE,
    kvcached=KVCACHED_RANGE,
    wanted="kvpatch.hostdevice.adapt:wanted",
    patches=(
        Patch(
            id="host.torch",
            target=f"{_INTERFACES}:torch",
            why="kvcached asks torch.cuda for the device's index and size",
            upstream="kvcached's unfinished CPU path (CPUPage in csrc/page.cpp)",
            until="kvcached asks a device interface instead of torch.cuda",
            wrapper="kvpatch.hostdevice.adapt:torch_with_host_device",
            parameters=(),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
            kind=Kind.REPLACE,
        ),
        Patch(
            id="host.device_name",
            target=f"{_INTERFACES}:normalize_gpu_device",
            why="vLLM's CPU workers name the device cpu, for which kvcached maps nothing",
            upstream="kvcached's unfinished CPU path (CPUPage in csrc/page.cpp)",
            until="kvcached has a CPU device of its own",
            wrapper="kvpatch.hostdevice.adapt:host_device_name",
            parameters=("device",),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="host.listener_device",
            target=f"{_INTERFACES}:resolve_gpu_device_index",
            why="the worker's listener thread would select a CUDA device",
            upstream="kvcached, start_worker_listener_thread in tp_ipc_util.py",
            until="kvcached asks a device interface instead of torch.cuda",
            wrapper="kvpatch.hostdevice.adapt:no_cuda_device",
            parameters=("device",),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="host.sync_before_unmap",
            target="kvcached.tp_ipc_util:_sync_before_unmap",
            why="without CUDA it waits for nothing, and copies to the CPU tier are in flight",
            upstream="kvcached, _sync_before_unmap in tp_ipc_util.py",
            until="kvcached asks a device interface instead of torch.cuda",
            wrapper="kvpatch.hostdevice.adapt:synchronize_copies",
            parameters=(),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="host.release_barrier",
            target="kvcached.integration.vllm.patches:_worker_physical_release_barrier",
            why="the barrier before an ordered unmap synchronises a CUDA device",
            upstream="kvcached, _worker_physical_release_barrier in patches.py",
            until="kvcached asks a device interface instead of torch.cuda",
            wrapper="kvpatch.hostdevice.adapt:replace_release_barrier",
            parameters=("worker",),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
            kind=Kind.REPLACE,
        ),
    ),
)

FEATURES = (HOST_DEVICE, ELASTIC, OFFLOADING, FENCE)
