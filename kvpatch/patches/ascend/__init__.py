"""vllm-ascend's SimpleCPUOffloadConnector on kvcached's memory of an NPU."""

from __future__ import annotations

from kvpatch.rows import Row, feature, replacement

_INTERFACES = "kvcached.integration.vllm.interfaces"
_WORKER = "vllm_ascend.simple_kv_offload"
_RUNNER = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"
_NO_NPU = "ovg-project/kvcached, GPUModelRunnerPatch in 0.1.6 (vLLM's own runner only)"

FEATURE = feature(
    __name__,
    summary="vllm-ascend's KV cache is on kvcached's memory, and its SimpleCPUOffloadConnector "
    "copies K and V after they were computed",
    since="0.23",
    upstream=_NO_NPU,
    until="kvcached uses a device interface instead of torch.cuda",
    wanted="presence:wanted",
    rules="rules:RULES",
    before_kvcached=True,
    optional=True,
    seams=(
        replacement(
            "ascend.torch",
            f"{_INTERFACES}:torch",
            "device:torch_with_npu",
            "kvcached reads the device's index and size from torch.cuda",
            "ovg-project/kvcached, interfaces.py in 0.1.6 (CUDA and ROCm only)",
        ),
        Row(
            "ascend.device_name",
            f"{_INTERFACES}:normalize_gpu_device",
            "device:npu_as_cuda(device)",
            "kvcached maps nothing for a device that is not called cuda",
            "ovg-project/kvcached, csrc/ftensor.cpp in 0.1.6 (is_cuda)",
            "kvcached knows the name npu",
        ),
        Row(
            "ascend.listener_device",
            f"{_INTERFACES}:resolve_gpu_device_index",
            "device:no_cuda_device(device)",
            "the worker's listener thread would select a CUDA device",
            "ovg-project/kvcached, start_worker_listener_thread in tp_ipc_util.py",
        ),
        Row(
            "ascend.sync_before_unmap",
            "kvcached.tp_ipc_util:_sync_before_unmap",
            "device:synchronize_npu",
            "without CUDA it waits for nothing, and pages are unmapped under the computation",
            "ovg-project/kvcached, _sync_before_unmap in tp_ipc_util.py",
        ),
        replacement(
            "ascend.release_barrier",
            "kvcached.integration.vllm.patches:_worker_physical_release_barrier",
            "device:replace_release_barrier(worker)",
            "the barrier before an ordered unmap synchronizes a CUDA device",
            "ovg-project/kvcached, _worker_physical_release_barrier in patches.py",
        ),
        Row(
            "ascend.allocation",
            f"{_RUNNER}._allocate_kv_cache_tensors",
            "allocation:from_kvcached(self, kv_cache_config)",
            "vllm-ascend allocates the KV cache itself, outside kvcached's memory",
            until="kvcached replaces the allocation of vllm-ascend",
        ),
        Row(
            "ascend.halves",
            f"{_RUNNER}._reshape_kv_cache_tensors",
            "allocation:as_pairs(self, kv_cache_config, kv_cache_raw_tensors)",
            "vllm-ascend takes K and V as two tensors, and kvcached returns one for both",
            until="kvcached replaces the allocation of vllm-ascend",
        ),
        Row(
            "ascend.kv_cache_tensors",
            f"{_RUNNER}.initialize_kv_cache_tensors",
            "allocation:around_kv_cache_tensors(self, kv_cache_config)",
            "KV caches outside kvcached's memory go unnoticed; see elastic_memory.kv_cache_tensors",
            until="kvcached refuses KV caches it did not allocate",
        ),
        Row(
            "ascend.worker_shutdown",
            "vllm_ascend.worker.worker:NPUWorker.shutdown",
            "allocation:after_shutdown",
            "the folder of a worker's socket stays in /tmp when the engine has ended",
            "ovg-project/kvcached, GPUWorkerPatch in 0.1.6 (vLLM's own worker only)",
            "kvcached ends its listener with vllm-ascend's worker",
        ),
        Row(
            "ascend.register_kv_caches",
            f"{_WORKER}.worker:SimpleCPUOffloadNPUWorker.register_kv_caches",
            "registration:around_register(self, kv_caches)",
            "K and V in the halves of one pool share a storage: V is never copied, without an "
            "error, and the worker's CPU tier has twice the scheduler's blocks",
            "vllm-project/vllm-ascend#8743 (K and V are separate allocations)",
            "vllm-ascend takes its regions from the KV cache config",
        ),
        Row(
            "ascend.copies_in_order",
            f"{_WORKER}.copy_backend:NPUDmaCopyBackend.launch_copy",
            "order:around_launch(self, is_store, wait_event)",
            "a store reads blocks that are still being computed",
            "vllm-project/vllm#46278 (event between computation and store)",
            later=("0.24", "a store waits for an event of the computation"),
        ),
    ),
)
