"""vLLM's own workers for the CPU tier on the host device; the code is in ``hostdevice.copies``."""

from __future__ import annotations

from functools import partial

from kvpatch.patch import Gap
from kvpatch.rows import Parts, Row, feature, gap, replacement, seam
from kvpatch.supported import FLOOR

_OFFLOAD = "vllm.v1.kv_offload"
_OLD, _NEW = f"{_OFFLOAD}.worker.cpu_gpu", f"{_OFFLOAD}.cpu.gpu_worker"
_SPEC = f"{_OFFLOAD}.cpu.spec"
_REGION, _REGISTER = f"{_OFFLOAD}.cpu.shared_offload_region", f"{_OFFLOAD}.cpu.host_register"
_SIMPLE = "vllm.v1.simple_kv_offload"
_UNTIL = "vLLM's CPU platform has streams, events and batched copies"

_TORCH, _PLATFORM = "copies:torch_with_streams", "copies:platform_with_streams"
_OPERATIONS, _AS_ASKED = "copies:operations_with_copies", "copies:pinned_as_asked"

_ABSENT = gap("there is no SimpleCPUOffloadConnector")
_STREAMS = "the worker takes streams, events and pinned memory from torch.cuda"
_SWAP = "the worker copies with CUDA's kernels"
_PINNED = "the CPU tier would not be registered with the device"
_CUDART = "the CPU tier is registered with CUDA's runtime"
_OLD_TORCH = Row("host_copies.copy_torch_old", f"{_OLD}:torch")
_OLD_BLOCKS = Row("host_copies.copy_blocks_old", f"{_OLD}:ops")
_rank = partial(
    replacement,
    wrapper=_TORCH,
    why="the spec takes the rank from the index of the accelerator",
    until=_UNTIL,
    later=("0.32", "the rank is in vLLM's configuration"),
)


def _stand_in(id: str, target: str, wrapper: str, why: str, since: str, *older: Row | Gap) -> Parts:
    return seam(replacement(id, target, wrapper, why, since=since), *older)


def _simple(id: str, name: str, wrapper: str, why: str) -> Parts:
    return _stand_in(id, f"{_SIMPLE}.{name}", wrapper, why, "0.19", _ABSENT)


FEATURE = feature(
    "kvpatch.hostdevice",
    name="host-copies",
    summary="vLLM's own workers copy between the host device and the CPU tier",
    since=FLOOR,
    upstream="none: vLLM copies with CUDA, ROCm and XPU only",
    until=_UNTIL,
    wanted="adapt:wanted",
    seams=(
        _stand_in("host_copies.copy_torch", f"{_NEW}:torch", _TORCH, _STREAMS, "0.21", _OLD_TORCH),
        _stand_in(
            "host_copies.copy_blocks", f"{_NEW}:ops", _OPERATIONS, _SWAP, "0.21", _OLD_BLOCKS
        ),
        _stand_in(
            "host_copies.copy_platform",
            f"{_NEW}:current_platform",
            _PLATFORM,
            "the worker takes its streams from the platform",
            "0.23",
            gap("the worker takes its streams from torch, see host_copies.copy_torch"),
        ),
        _stand_in(
            "host_copies.copy_pinned",
            f"{_NEW}:PIN_MEMORY",
            "copies:pinned",
            _PINNED,
            "0.24",
            Row(
                "host_copies.copy_pin_available",
                f"{_NEW}:is_pin_memory_available",
                _AS_ASKED,
                since="0.21",
            ),
            Row("host_copies.copy_pin_available_old", f"{_OLD}:is_pin_memory_available"),
        ),
        _stand_in(
            "host_copies.copy_spec",
            f"{_SPEC}:current_platform",
            _PLATFORM,
            "the spec makes a worker on GPUs only",
            "0.19",
            Row("host_copies.copy_spec_old", f"{_OFFLOAD}.cpu:current_platform"),
        ),
        _rank(
            "host_copies.copy_rank",
            f"{_SPEC}:torch",
            since="0.27",
            earlier="the spec has no region that ranks share",
        ),
        _rank(
            "host_copies.copy_tier_rank",
            f"{_OFFLOAD}.tiering.spec:torch",
            since="0.24",
            earlier="secondary tiers are refused (KVP329)",
        ),
        _stand_in(
            "host_copies.copy_register",
            f"{_REGISTER}:CudaRTLibrary",
            "copies:host_registration",
            _CUDART,
            "0.32",
            Row("host_copies.copy_register_in_worker", f"{_NEW}:CudaRTLibrary", since="0.31"),
            gap("the worker registers with torch.cuda, see host_copies.copy_torch"),
        ),
        _stand_in(
            "host_copies.copy_register_platform",
            f"{_REGISTER}:current_platform",
            _PLATFORM,
            "host memory is registered on GPUs only",
            "0.32",
            Row(
                "host_copies.copy_unregister",
                f"{_REGION}:torch",
                _TORCH,
                "the CPU tier is deregistered with torch.cuda",
                until=_UNTIL,
                since="0.20",
            ),
            gap("there is no shared region"),
        ),
        replacement(
            "host_copies.copy_unregister_platform",
            f"{_REGION}:current_platform",
            _PLATFORM,
            "the CPU tier is deregistered on GPUs only",
            until=_UNTIL,
            since="0.23",
            earlier="it is deregistered wherever the engine runs",
            later=("0.32", "vLLM asks where it registers: host_copies.copy_register_platform"),
        ),
        _simple("host_copies.simple_torch", "worker:torch", _TORCH, _STREAMS),
        _stand_in(
            "host_copies.simple_pinned",
            f"{_SIMPLE}.worker:PIN_MEMORY",
            "copies:pinned",
            _PINNED,
            "0.24",
            Row(
                "host_copies.simple_pin_available",
                f"{_SIMPLE}.worker:is_pin_memory_available",
                _AS_ASKED,
                since="0.19",
            ),
            _ABSENT,
        ),
        _simple("host_copies.simple_register", "cuda_mem_ops:torch", _TORCH, _CUDART),
        _stand_in(
            "host_copies.simple_memcpy",
            f"{_SIMPLE}.cuda_mem_ops:_resolve_batch_memcpy",
            "copies:batched_copies",
            "blocks are copied by a function of CUDA's driver",
            "0.29",
            Row(
                "host_copies.simple_memcpy_alone",
                wrapper="legacy:batched_copies",
                until="vLLM 0.29",
                since="0.19",
            ),
            _ABSENT,
        ),
        _simple(
            "host_copies.simple_events",
            "copy_backend:torch",
            _TORCH,
            "the end of a copy is an event of torch",
        ),
        _simple(
            "host_copies.simple_device",
            "copy_backend:current_platform",
            _PLATFORM,
            "the thread that copies sets its device",
        ),
        seam(
            Row(
                "host_copies.copy_device",
                f"{_NEW}:CPUOffloadingWorker.__init__",
                "copies:on_device(self, kv_caches)",
                "the worker requires tensors that are CUDA's",
                since="0.25",
            ),
            Row(
                "host_copies.copy_device_of_handlers",
                f"{_NEW}:CpuGpuOffloadingHandlers.__init__",
                why="the handlers require tensors that are CUDA's",
                since="0.21",
            ),
            Row(
                "host_copies.copy_device_of_handlers_old",
                f"{_OLD}:CpuGpuOffloadingHandlers.__init__",
                until="vLLM 0.21",
                since="0.19",
            ),
            Row(
                "host_copies.copy_device_of_layers",
                wrapper="legacy:layers_on_device(self, gpu_caches, attn_backends)",
                why="the handlers require tensors that are CUDA's, here by layer",
            ),
        ),
    ),
)
