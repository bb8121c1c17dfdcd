"""vllm-ascend's SimpleCPUOffloadConnector on kvcached's memory of an NPU.

kvcached names torch.cuda where it means the device; vllm-ascend's worker takes its regions from
storages, and its copies are not ordered behind the computation.
"""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Kind, Patch, seam

_INTERFACES = "kvcached.integration.vllm.interfaces"
_WORKER = "vllm_ascend.simple_kv_offload"
_RUNNER = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"
_NO_NPU = "ovg-project/kvcached, GPUModelRunnerPatch in 0.1.6 (vLLM's own runner only)"

FEATURE = Feature(
    name="ascend",
    summary="vllm-ascend's KV cache is on kvcached's memory, and its SimpleCPUOffloadConnector "
    "copies K and V after they were computed",
    since="0.23",
    wanted="kvpatch.patches.ascend.presence:wanted",
    before_kvcached=True,
    rules="kvpatch.patches.ascend.rules:RULES",
    optional=True,
    seams=(
        Patch(
            id="ascend.torch",
            target=f"{_INTERFACES}:torch",
            why="kvcached reads the device's index and size from torch.cuda",
            upstream="ovg-project/kvcached, interfaces.py in 0.1.6 (CUDA and ROCm only)",
            until="kvcached uses a device interface instead of torch.cuda",
            wrapper="kvpatch.patches.ascend.device:torch_with_npu",
            parameters=(),
            since="0.23",
            kind=Kind.REPLACE,
        ),
        Patch(
            id="ascend.device_name",
            target=f"{_INTERFACES}:normalize_gpu_device",
            why="kvcached maps nothing for a device that is not called cuda",
            upstream="ovg-project/kvcached, csrc/ftensor.cpp in 0.1.6 (is_cuda)",
            until="kvcached knows the name npu",
            wrapper="kvpatch.patches.ascend.device:npu_as_cuda",
            parameters=("device",),
            since="0.23",
        ),
        Patch(
            id="ascend.listener_device",
            target=f"{_INTERFACES}:resolve_gpu_device_index",
            why="the worker's listener thread would select a CUDA device",
            upstream="ovg-project/kvcached, start_worker_listener_thread in tp_ipc_util.py",
            until="kvcached uses a device interface instead of torch.cuda",
            wrapper="kvpatch.patches.ascend.device:no_cuda_device",
            parameters=("device",),
            since="0.23",
        ),
        Patch(
            id="ascend.sync_before_unmap",
            target="kvcached.tp_ipc_util:_sync_before_unmap",
            why="without CUDA it waits for nothing, and pages are unmapped under the computation",
            upstream="ovg-project/kvcached, _sync_before_unmap in tp_ipc_util.py",
            until="kvcached uses a device interface instead of torch.cuda",
            wrapper="kvpatch.patches.ascend.device:synchronize_npu",
            parameters=(),
            since="0.23",
        ),
        Patch(
            id="ascend.release_barrier",
            target="kvcached.integration.vllm.patches:_worker_physical_release_barrier",
            why="the barrier before an ordered unmap synchronizes a CUDA device",
            upstream="ovg-project/kvcached, _worker_physical_release_barrier in patches.py",
            until="kvcached uses a device interface instead of torch.cuda",
            wrapper="kvpatch.patches.ascend.device:replace_release_barrier",
            parameters=("worker",),
            since="0.23",
            kind=Kind.REPLACE,
        ),
        Patch(
            id="ascend.allocation",
            target=f"{_RUNNER}._allocate_kv_cache_tensors",
            why="vllm-ascend allocates the KV cache itself, outside kvcached's memory",
            upstream=_NO_NPU,
            until="kvcached replaces the allocation of vllm-ascend",
            wrapper="kvpatch.patches.ascend.allocation:from_kvcached",
            parameters=("self", "kv_cache_config"),
            since="0.23",
        ),
        Patch(
            id="ascend.halves",
            target=f"{_RUNNER}._reshape_kv_cache_tensors",
            why="vllm-ascend takes K and V as two tensors, and kvcached returns one for both",
            upstream=_NO_NPU,
            until="kvcached replaces the allocation of vllm-ascend",
            wrapper="kvpatch.patches.ascend.allocation:as_pairs",
            parameters=("self", "kv_cache_config", "kv_cache_raw_tensors"),
            since="0.23",
        ),
        Patch(
            id="ascend.kv_cache_tensors",
            target=f"{_RUNNER}.initialize_kv_cache_tensors",
            why="KV caches outside kvcached's memory go unnoticed; see elastic.kv_cache_tensors",
            upstream=_NO_NPU,
            until="kvcached refuses KV caches it did not allocate",
            wrapper="kvpatch.patches.ascend.allocation:around_kv_cache_tensors",
            parameters=("self", "kv_cache_config"),
            since="0.23",
        ),
        Patch(
            id="ascend.worker_shutdown",
            target="vllm_ascend.worker.worker:NPUWorker.shutdown",
            why="the folder of a worker's socket stays in /tmp when the engine has ended",
            upstream="ovg-project/kvcached, GPUWorkerPatch in 0.1.6 (vLLM's own worker only)",
            until="kvcached ends its listener with vllm-ascend's worker",
            wrapper="kvpatch.patches.ascend.allocation:after_shutdown",
            parameters=("self",),
            since="0.23",
        ),
        Patch(
            id="ascend.register_kv_caches",
            target=f"{_WORKER}.worker:SimpleCPUOffloadNPUWorker.register_kv_caches",
            why="K and V in the halves of one pool share a storage: V is never copied, without an "
            "error, and the worker's CPU tier has twice the scheduler's blocks",
            upstream="vllm-project/vllm-ascend#8743 (K and V are separate allocations)",
            until="vllm-ascend takes its regions from the KV cache config",
            wrapper="kvpatch.patches.ascend.registration:around_register",
            parameters=("self", "kv_caches"),
            since="0.23",
        ),
        seam(
            Patch(
                id="ascend.copies_in_order",
                target=f"{_WORKER}.copy_backend:NPUDmaCopyBackend.launch_copy",
                why="a store reads blocks that are still being computed",
                upstream="vllm-project/vllm#46278 (event between computation and store)",
                until="vLLM 0.24",
                wrapper="kvpatch.patches.ascend.order:around_launch",
                parameters=("self", "is_store", "wait_event"),
                since="0.23",
                before="0.24",
            ),
            Gap("0.24", None, "a store waits for an event of the computation"),
        ),
    ),
)
