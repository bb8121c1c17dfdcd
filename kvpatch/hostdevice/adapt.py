"""The CUDA interfaces that kvcached's Python code uses, implemented by the host device."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import wrapt

from kvpatch import private
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR
from kvpatch.hostdevice import ledger, streams
from kvpatch.patch import argument
from kvpatch.refusal import Refusal

_SYNCHRONIZE = ctypes.CFUNCTYPE(None)(streams.synchronize)


def wanted() -> bool:
    """Whether this vLLM runs on a CPU, where kvcached needs the host device, or Refusal."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    import kvcached._C

    extension = ctypes.CDLL(kvcached._C.__file__)
    if not hasattr(extension, "kvpatch_host_device_abi"):
        raise Refusal(
            "this machine has no GPU and kvcached was built for one",
            "kvcached then has no memory to map",
            "run python -m kvpatch.hostdevice install, or set KVPATCH=0",
            code="KVP501",
        )
    size = ledger.require_size()
    try:
        agreed = ledger.size_in_use()
    except private.Unsafe as error:
        raise error.refusal(
            "its owner could stop every engine on the host device",
            f"set {HOST_DEVICE_DIR} to another folder",
        ) from error
    if agreed not in (None, size):
        raise Refusal(
            f"{HOST_DEVICE} is {size} bytes here and {agreed} in running processes",
            "all of them share one device",
            f"set {HOST_DEVICE} to the same size everywhere, or stop the others",
            code="KVP503",
        )
    extension.kvpatch_host_on_synchronize(_SYNCHRONIZE)
    return True


class _TorchWithHostDevice(wrapt.ObjectProxy):  # type: ignore[misc]
    @property
    def cuda(self) -> Any:
        return SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            is_initialized=lambda: True,
            mem_get_info=ledger.memory,
            get_device_name=lambda: "host device",
            get_device_properties=lambda device: SimpleNamespace(total_memory=ledger.device_size()),
        )


def torch_with_host_device(torch: Any) -> Any:
    """Replace ``torch`` in one module of kvcached only."""
    return _TorchWithHostDevice(torch)


def host_device_name(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> str:
    """Return ``cuda:<local rank>`` for a CPU worker's device: kvcached maps memory for it."""
    device = argument(args, kwargs, 0, "device")
    if not str(device).startswith("cpu"):
        return str(wrapped(device))
    from vllm.distributed import parallel_state

    return f"cuda:{parallel_state.get_world_group().local_rank}"


def with_device_size(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Make ``torch.cuda`` report the host device's size to a function that imports torch."""
    import torch

    original = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        total_memory=ledger.device_size()
    )
    try:
        return wrapped(*args, **kwargs)
    finally:
        torch.cuda.get_device_properties = original


def with_blocks_outermost(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Add kvcached's contiguous layout: the kernels read the blocks' stride from the tensor."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return (*wrapped(*args, **kwargs), KVCacheLayout.BLHNC)


def no_cuda_device(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Return no CUDA device for the listener thread to select."""


def synchronize_copies(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Wait for the copies that this worker has launched, as a CUDA synchronization would."""
    streams.synchronize()


def release_barrier(worker: Any) -> bool:
    """Wait for the copies that a worker has launched; runs in the worker by RPC."""
    streams.synchronize()
    return True


def replace_release_barrier(original: Any) -> Any:
    """Return ``release_barrier``; a plain function, because it is pickled by name."""
    return release_barrier
