"""vLLM's own workers for the CPU tier on the host device; the code is in ``hostdevice.copies``."""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Kind, Patch, seam
from kvpatch.supported import FLOOR

_COPIES = "kvpatch.hostdevice.copies"
_OFFLOAD = "vllm.v1.kv_offload"
_OLD, _NEW = f"{_OFFLOAD}.worker.cpu_gpu", f"{_OFFLOAD}.cpu.gpu_worker"
_SPEC_OF_ONE_FILE, _SPEC = f"{_OFFLOAD}.cpu", f"{_OFFLOAD}.cpu.spec"
_TIERS = f"{_OFFLOAD}.tiering.spec"
_REGION, _REGISTER = f"{_OFFLOAD}.cpu.shared_offload_region", f"{_OFFLOAD}.cpu.host_register"
_SIMPLE = "vllm.v1.simple_kv_offload"
_NONE = "none: vLLM copies with CUDA, ROCm and XPU only"
_UNTIL = "vLLM's CPU platform has streams, events and batched copies"


_ABSENT = Gap("0.16", "0.19", "there is no SimpleCPUOffloadConnector")


def _name(
    row: str, target: str, wrapper: str, why: str, since: str, before: str | None = None
) -> Patch:
    """Return the row that replaces a name in one module of vLLM."""
    return Patch(
        id=f"host.{row}",
        target=target,
        why=why,
        upstream=_NONE,
        until=_UNTIL,
        wrapper=f"{_COPIES}:{wrapper}",
        parameters=(),
        since=since,
        before=before,
        kind=Kind.REPLACE,
    )


_STREAMS = "the worker takes streams, events and pinned memory from torch.cuda"
_SWAP = "the worker copies with CUDA's kernels"
_PLATFORM = "the worker takes its streams from the platform"
_PINNED = "the CPU tier would not be registered with the device"
_CUDA_ALIKE = "the spec makes a worker on GPUs only"
_RANK = "the spec takes the rank from the index of the accelerator"
_BATCH = "blocks are copied by a function of CUDA's driver"
_CUDART = "the CPU tier is registered with CUDA's runtime"

FEATURE = Feature(
    name="host-copies",
    summary="vLLM's own workers copy between the host device and the CPU tier",
    since=FLOOR,
    wanted="kvpatch.hostdevice.adapt:wanted",
    seams=(
        seam(
            _name("copy_torch", f"{_NEW}:torch", "torch_with_streams", _STREAMS, "0.21"),
            _name(
                "copy_torch_old", f"{_OLD}:torch", "torch_with_streams", _STREAMS, "0.16", "0.21"
            ),
        ),
        seam(
            _name("copy_blocks", f"{_NEW}:ops", "operations_with_copies", _SWAP, "0.21"),
            _name(
                "copy_blocks_old", f"{_OLD}:ops", "operations_with_copies", _SWAP, "0.16", "0.21"
            ),
        ),
        seam(
            _name(
                "copy_platform",
                f"{_NEW}:current_platform",
                "platform_with_streams",
                _PLATFORM,
                "0.23",
            ),
            Gap("0.16", "0.23", "the worker takes its streams from torch, see host.copy_torch"),
        ),
        seam(
            _name("copy_pinned", f"{_NEW}:PIN_MEMORY", "pinned", _PINNED, "0.24"),
            _name(
                "copy_pin_available",
                f"{_NEW}:is_pin_memory_available",
                "pinned_as_asked",
                _PINNED,
                "0.21",
                "0.24",
            ),
            _name(
                "copy_pin_available_old",
                f"{_OLD}:is_pin_memory_available",
                "pinned_as_asked",
                _PINNED,
                "0.16",
                "0.21",
            ),
        ),
        seam(
            _name(
                "copy_spec",
                f"{_SPEC}:current_platform",
                "platform_with_streams",
                _CUDA_ALIKE,
                "0.19",
            ),
            _name(
                "copy_spec_old",
                f"{_SPEC_OF_ONE_FILE}:current_platform",
                "platform_with_streams",
                _CUDA_ALIKE,
                "0.16",
                "0.19",
            ),
        ),
        seam(
            _name("copy_rank", f"{_SPEC}:torch", "torch_with_streams", _RANK, "0.27", "0.32"),
            Gap("0.16", "0.27", "the spec has no region that ranks share"),
            Gap("0.32", None, "the rank is in vLLM's configuration"),
        ),
        seam(
            _name("copy_tier_rank", f"{_TIERS}:torch", "torch_with_streams", _RANK, "0.24", "0.32"),
            Gap("0.16", "0.24", "secondary tiers are refused (KVP329)"),
            Gap("0.32", None, "the rank is in vLLM's configuration"),
        ),
        seam(
            _name(
                "copy_register", f"{_REGISTER}:CudaRTLibrary", "host_registration", _CUDART, "0.32"
            ),
            _name(
                "copy_register_in_worker",
                f"{_NEW}:CudaRTLibrary",
                "host_registration",
                _CUDART,
                "0.31",
                "0.32",
            ),
            Gap("0.16", "0.31", "the worker registers with torch.cuda, see host.copy_torch"),
        ),
        seam(
            _name(
                "copy_register_platform",
                f"{_REGISTER}:current_platform",
                "platform_with_streams",
                "host memory is registered on GPUs only",
                "0.32",
            ),
            _name(
                "copy_unregister",
                f"{_REGION}:torch",
                "torch_with_streams",
                "the CPU tier is deregistered with torch.cuda",
                "0.20",
                "0.32",
            ),
            Gap("0.16", "0.20", "there is no shared region"),
        ),
        seam(
            _name(
                "copy_unregister_platform",
                f"{_REGION}:current_platform",
                "platform_with_streams",
                "the CPU tier is deregistered on GPUs only",
                "0.23",
                "0.32",
            ),
            Gap("0.16", "0.23", "it is deregistered wherever the engine runs"),
            Gap("0.32", None, "vLLM asks where it registers, see host.copy_register_platform"),
        ),
        seam(
            _name(
                "simple_torch", f"{_SIMPLE}.worker:torch", "torch_with_streams", _STREAMS, "0.19"
            ),
            _ABSENT,
        ),
        seam(
            _name("simple_pinned", f"{_SIMPLE}.worker:PIN_MEMORY", "pinned", _PINNED, "0.24"),
            _name(
                "simple_pin_available",
                f"{_SIMPLE}.worker:is_pin_memory_available",
                "pinned_as_asked",
                _PINNED,
                "0.19",
                "0.24",
            ),
            _ABSENT,
        ),
        seam(
            _name(
                "simple_register",
                f"{_SIMPLE}.cuda_mem_ops:torch",
                "torch_with_streams",
                _CUDART,
                "0.19",
            ),
            _ABSENT,
        ),
        seam(
            _name(
                "simple_memcpy",
                f"{_SIMPLE}.cuda_mem_ops:_resolve_batch_memcpy",
                "batched_copies",
                _BATCH,
                "0.29",
            ),
            Patch(
                id="host.simple_memcpy_alone",
                target=f"{_SIMPLE}.cuda_mem_ops:_resolve_batch_memcpy",
                why=_BATCH,
                upstream=_NONE,
                until="vLLM 0.29",
                wrapper="kvpatch.hostdevice.legacy:batched_copies",
                parameters=(),
                since="0.19",
                before="0.29",
                kind=Kind.REPLACE,
            ),
            _ABSENT,
        ),
        seam(
            _name(
                "simple_events",
                f"{_SIMPLE}.copy_backend:torch",
                "torch_with_streams",
                "the end of a copy is an event of torch",
                "0.19",
            ),
            _ABSENT,
        ),
        seam(
            _name(
                "simple_device",
                f"{_SIMPLE}.copy_backend:current_platform",
                "platform_with_streams",
                "the thread that copies sets its device",
                "0.19",
            ),
            _ABSENT,
        ),
        seam(
            Patch(
                id="host.copy_device",
                target=f"{_NEW}:CPUOffloadingWorker.__init__",
                why="the worker requires tensors that are CUDA's",
                upstream=_NONE,
                until=_UNTIL,
                wrapper=f"{_COPIES}:on_device",
                parameters=("self", "kv_caches"),
                since="0.25",
            ),
            Patch(
                id="host.copy_device_of_handlers",
                target=f"{_NEW}:CpuGpuOffloadingHandlers.__init__",
                why="the handlers require tensors that are CUDA's",
                upstream=_NONE,
                until="vLLM 0.25",
                wrapper=f"{_COPIES}:on_device",
                parameters=("self", "kv_caches"),
                since="0.21",
                before="0.25",
            ),
            Patch(
                id="host.copy_device_of_handlers_old",
                target=f"{_OLD}:CpuGpuOffloadingHandlers.__init__",
                why="the handlers require tensors that are CUDA's",
                upstream=_NONE,
                until="vLLM 0.21",
                wrapper=f"{_COPIES}:on_device",
                parameters=("self", "kv_caches"),
                since="0.19",
                before="0.21",
            ),
            Patch(
                id="host.copy_device_of_layers",
                target=f"{_OLD}:CpuGpuOffloadingHandlers.__init__",
                why="the handlers require tensors that are CUDA's, here by layer",
                upstream=_NONE,
                until="vLLM 0.19",
                wrapper="kvpatch.hostdevice.legacy:layers_on_device",
                parameters=("self", "gpu_caches", "attn_backends"),
                since="0.16",
                before="0.19",
            ),
        ),
    ),
)
