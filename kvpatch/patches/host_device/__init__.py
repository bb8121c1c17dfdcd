"""kvcached's allocator on host memory, and what vLLM's CPU backend lacks on it.

The code is in ``hostdevice``; all of it is the distribution kvpatch-hostdevice's.
"""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Kind, Patch, seam
from kvpatch.supported import FLOOR

_INTERFACES = "kvcached.integration.vllm.interfaces"
_LATENT = "vllm.v1.attention.backends.mla.cpu_mla:CPUMLAImpl"
_NO_LATENT = Gap(FLOOR, "0.29", "latent attention is not validated on a CPU (KVP305)")

FEATURE = Feature(
    name="host-device",
    summary="kvcached's own allocator runs on host memory, on machines without a GPU",
    since=FLOOR,
    wanted="kvpatch.hostdevice.adapt:wanted",
    requires="kvpatch.patches.host_device.size:require",
    seams=(
        Patch(
            id="host.torch",
            target=f"{_INTERFACES}:torch",
            why="kvcached reads the device's index and size from torch.cuda",
            upstream="kvcached's unfinished CPU path (CPUPage in csrc/page.cpp)",
            until="kvcached uses a device interface instead of torch.cuda",
            wrapper="kvpatch.hostdevice.adapt:torch_with_host_device",
            parameters=(),
            since="0.16",
            kind=Kind.REPLACE,
        ),
        Patch(
            id="host.device_name",
            target=f"{_INTERFACES}:normalize_gpu_device",
            why="the device of vLLM's CPU workers is cpu, for which kvcached maps nothing",
            upstream="kvcached's unfinished CPU path (CPUPage in csrc/page.cpp)",
            until="kvcached has a CPU device of its own",
            wrapper="kvpatch.hostdevice.adapt:host_device_name",
            parameters=("device",),
            since="0.16",
        ),
        Patch(
            id="host.listener_device",
            target=f"{_INTERFACES}:resolve_gpu_device_index",
            why="the worker's listener thread would select a CUDA device",
            upstream="kvcached, start_worker_listener_thread in tp_ipc_util.py",
            until="kvcached uses a device interface instead of torch.cuda",
            wrapper="kvpatch.hostdevice.adapt:no_cuda_device",
            parameters=("device",),
            since="0.16",
        ),
        Patch(
            id="host.sync_before_unmap",
            target="kvcached.tp_ipc_util:_sync_before_unmap",
            why="without CUDA it waits for nothing, while copies to the CPU tier are in flight",
            upstream="kvcached, _sync_before_unmap in tp_ipc_util.py",
            until="kvcached uses a device interface instead of torch.cuda",
            wrapper="kvpatch.hostdevice.adapt:synchronize_copies",
            parameters=(),
            since="0.16",
        ),
        Patch(
            id="host.release_barrier",
            target="kvcached.integration.vllm.patches:_worker_physical_release_barrier",
            why="the barrier before an ordered unmap synchronizes a CUDA device",
            upstream="kvcached, _worker_physical_release_barrier in patches.py",
            until="kvcached uses a device interface instead of torch.cuda",
            wrapper="kvpatch.hostdevice.adapt:replace_release_barrier",
            parameters=("worker",),
            since="0.16",
            kind=Kind.REPLACE,
        ),
        seam(
            Patch(
                id="host.size_for_v2",
                target="kvcached.integration.vllm.model_runner_v2:allocate_kv_cache",
                why="kvcached reads the device's size from torch.cuda",
                upstream="kvcached's unfinished CPU path (CPUPage in csrc/page.cpp)",
                until="kvcached uses a device interface instead of torch.cuda",
                wrapper="kvpatch.hostdevice.adapt:with_device_size",
                parameters=("config", "device", "layout"),
                since="0.29",
            ),
            Gap("0.16", "0.29", "kvcached's interfaces read the size, see host.torch"),
        ),
        seam(
            Patch(
                id="host.layouts",
                target="vllm.v1.attention.backends.cpu_attn:"
                "CPUAttentionBackend.supported_kv_cache_layouts",
                why="the CPU backend declares no layout in which a block's layers are contiguous",
                upstream="none: it reads such blocks by their strides, but does not declare it",
                until="vLLM's CPU backend declares BLHNC",
                wrapper="kvpatch.hostdevice.adapt:with_blocks_outermost",
                parameters=(),
                since="0.29",
            ),
            Gap("0.16", "0.29", "vLLM has no named KV cache layouts"),
        ),
        seam(
            Patch(
                id="host.latent_caching",
                target="vllm.platforms.cpu:CpuPlatform.check_and_update_config",
                why="vLLM disables the prefix cache for latent attention on a CPU, and so loads",
                upstream="none: rotary embedding on a CPU skips the first token of a step",
                until="vLLM's CPU backend supports cached prefixes with latent attention",
                wrapper="kvpatch.hostdevice.latent_attention:keep_prefix_caching",
                parameters=("vllm_config",),
                since="0.29",
            ),
            _NO_LATENT,
        ),
        seam(
            Patch(
                id="host.latent_write",
                target=f"{_LATENT}.do_kv_cache_update",
                why="it writes to one dense tensor, but a block's layers are contiguous",
                upstream="none: without kvcached a CPU has no other layout",
                until="vLLM's CPU backend uses the strides of the KV cache",
                wrapper="kvpatch.hostdevice.latent_attention:replace_write",
                parameters=("kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype"),
                since="0.29",
                kind=Kind.REPLACE,
            ),
            _NO_LATENT,
        ),
        seam(
            Patch(
                id="host.latent_decode",
                target=f"{_LATENT}.forward_mqa",
                why="as host.latent_write, for reading",
                upstream="none: without kvcached a CPU has no other layout",
                until="vLLM's CPU backend uses the strides of the KV cache",
                wrapper="kvpatch.hostdevice.latent_attention:replace_decode",
                parameters=("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
                since="0.29",
                kind=Kind.REPLACE,
            ),
            _NO_LATENT,
        ),
        seam(
            Patch(
                id="host.latent_gather",
                target="vllm._custom_ops:gather_mla_context_cache_cpu",
                why="as host.latent_write, for the cached blocks that a prefill reads",
                upstream="none: without kvcached a CPU has no other layout",
                until="vLLM's CPU backend uses the strides of the KV cache",
                wrapper="kvpatch.hostdevice.latent_attention:replace_gather",
                parameters=("src_cache", "dst", "block_table", "starts", "cu_seq_lens"),
                since="0.29",
                kind=Kind.REPLACE,
            ),
            _NO_LATENT,
        ),
    ),
)
