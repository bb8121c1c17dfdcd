"""Rows that run kvcached's allocator on ordinary memory."""

from __future__ import annotations

from kvpatch.patch import Feature, Kind, Patch
from kvpatch.registry.releases import KVCACHED_RANGE, VLLM_RANGE

_INTERFACES = "kvcached.integration.vllm.interfaces"

FEATURE = Feature(
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
        Patch(
            id="host.size_for_v2",
            target="kvcached.integration.vllm.model_runner_v2:allocate_kv_cache",
            why="kvcached asks torch.cuda for the device's size",
            upstream="kvcached's unfinished CPU path (CPUPage in csrc/page.cpp)",
            until="kvcached asks a device interface instead of torch.cuda",
            wrapper="kvpatch.hostdevice.adapt:with_device_size",
            parameters=("config", "device", "layout"),
            vllm=">=0.29,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="host.layouts",
            target="vllm.v1.attention.backends.cpu_attn:"
            "CPUAttentionBackend.supported_kv_cache_layouts",
            why="the CPU backend does not name a layout in which a block's layers lie together",
            upstream="none: it reads such blocks by their strides, and does not say so",
            until="vLLM's CPU backend names BLHNC",
            wrapper="kvpatch.hostdevice.adapt:with_blocks_outermost",
            parameters=(),
            vllm=">=0.29,<0.34",
            kvcached="==0.1.6",
        ),
    ),
)
