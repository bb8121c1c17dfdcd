"""kvcached's allocator on host memory, and what vLLM's CPU backend lacks on it."""

from __future__ import annotations

from kvpatch.rows import Row, feature, replacement
from kvpatch.supported import FLOOR

_INTERFACES = "kvcached.integration.vllm.interfaces"
_LATENT = "vllm.v1.attention.backends.mla.cpu_mla:CPUMLAImpl"
_NO_LATENT = "latent attention is not validated on a CPU (KVP305)"
_DENSE = (
    "none: without kvcached a CPU has no other layout",
    "vLLM's CPU backend uses the strides of the KV cache",
)

FEATURE = feature(
    "kvpatch.hostdevice",
    name="host-device",
    summary="kvcached's own allocator runs on host memory, on machines without a GPU",
    since=FLOOR,
    upstream="kvcached's unfinished CPU path (CPUPage in csrc/page.cpp)",
    until="kvcached uses a device interface instead of torch.cuda",
    wanted="adapt:wanted",
    requires="kvpatch.patches.host_device.size:require",
    seams=(
        replacement(
            "host_device.torch",
            f"{_INTERFACES}:torch",
            "adapt:torch_with_host_device",
            "kvcached reads the device's index and size from torch.cuda",
        ),
        Row(
            "host_device.device_name",
            f"{_INTERFACES}:normalize_gpu_device",
            "adapt:host_device_name(device)",
            "the device of vLLM's CPU workers is cpu, for which kvcached maps nothing",
            until="kvcached has a CPU device of its own",
        ),
        Row(
            "host_device.listener_device",
            f"{_INTERFACES}:resolve_gpu_device_index",
            "adapt:no_cuda_device(device)",
            "the worker's listener thread would select a CUDA device",
            "kvcached, start_worker_listener_thread in tp_ipc_util.py",
        ),
        Row(
            "host_device.sync_before_unmap",
            "kvcached.tp_ipc_util:_sync_before_unmap",
            "adapt:synchronize_copies",
            "without CUDA it waits for nothing, while copies to the CPU tier are in flight",
            "kvcached, _sync_before_unmap in tp_ipc_util.py",
        ),
        replacement(
            "host_device.release_barrier",
            "kvcached.integration.vllm.patches:_worker_physical_release_barrier",
            "adapt:replace_release_barrier(worker)",
            "the barrier before an ordered unmap synchronizes a CUDA device",
            "kvcached, _worker_physical_release_barrier in patches.py",
        ),
        Row(
            "host_device.size_for_v2",
            "kvcached.integration.vllm.model_runner_v2:allocate_kv_cache",
            "adapt:with_device_size(config, device, layout)",
            "kvcached reads the device's size from torch.cuda",
            since="0.29",
            earlier="kvcached's interfaces read the size, see host_device.torch",
        ),
        Row(
            "host_device.layouts",
            "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.supported_kv_cache_layouts",
            "adapt:with_blocks_outermost()",
            "the CPU backend declares no layout in which a block's layers are contiguous",
            "none: it reads such blocks by their strides, but does not declare it",
            "vLLM's CPU backend declares BLHNC",
            since="0.29",
            earlier="vLLM has no named KV cache layouts",
        ),
        Row(
            "host_device.latent_caching",
            "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
            "latent_attention:keep_prefix_caching(vllm_config)",
            "vLLM disables the prefix cache for latent attention on a CPU, and so loads",
            "none: rotary embedding on a CPU skips the first token of a step",
            "vLLM's CPU backend supports cached prefixes with latent attention",
            since="0.29",
            earlier=_NO_LATENT,
        ),
        replacement(
            "host_device.latent_write",
            f"{_LATENT}.do_kv_cache_update",
            "latent_attention:replace_write(kv_c_normed, k_pe, kv_cache, slot_mapping, "
            "kv_cache_dtype)",
            "it writes to one dense tensor, but a block's layers are contiguous",
            *_DENSE,
            since="0.29",
            earlier=_NO_LATENT,
        ),
        replacement(
            "host_device.latent_decode",
            f"{_LATENT}.forward_mqa",
            "latent_attention:replace_decode(q, kv_c_and_k_pe_cache, attn_metadata, layer)",
            "as host_device.latent_write, for reading",
            *_DENSE,
            since="0.29",
            earlier=_NO_LATENT,
        ),
        replacement(
            "host_device.latent_gather",
            "vllm._custom_ops:gather_mla_context_cache_cpu",
            "latent_attention:replace_gather(src_cache, dst, block_table, starts, cu_seq_lens)",
            "as host_device.latent_write, for the cached blocks that a prefill reads",
            *_DENSE,
            since="0.29",
            earlier=_NO_LATENT,
        ),
    ),
)
