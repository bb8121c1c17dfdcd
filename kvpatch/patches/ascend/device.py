"""The NPU where kvcached's Python code names CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import wrapt

from kvpatch.patch import argument


class _TorchWithNPU(wrapt.ObjectProxy):  # type: ignore[misc]
    """``torch`` with the NPU as ``torch.cuda``."""

    @property
    def cuda(self) -> Any:
        npu = self.npu
        return SimpleNamespace(
            is_available=npu.is_available,
            current_device=npu.current_device,
            get_device_properties=lambda device: SimpleNamespace(
                total_memory=npu.mem_get_info(_index(device))[1]
            ),
        )


def _index(device: Any) -> Any:
    """Return the index in ``cuda:<index>``, or None for the current device."""
    _, _, index = str(device).partition(":")
    return int(index) if index else None


def torch_with_npu(torch: Any) -> Any:
    """Replace ``torch`` in one module of kvcached only."""
    return _TorchWithNPU(torch)


def npu_as_cuda(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> str:
    """Return ``cuda:<index>`` for ``npu:<index>``: kvcached's C++ maps memory for no other name.

    There the name is read as an NPU, because kvcached was built on the ACL runtime.
    """
    device = str(argument(args, kwargs, 0, "device"))
    kind, colon, index = device.partition(":")
    return f"cuda{colon}{index}" if kind == "npu" else str(wrapped(device))


def no_cuda_device(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Return no device: kvcached's calls select the NPU in every thread (ascend/include/cuda.h)."""


def synchronize_npu(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Wait for the whole device, as kvcached does on CUDA."""
    import torch

    torch.npu.synchronize()


def release_barrier(worker: Any) -> bool:
    """Wait for a worker's device; runs in the worker by RPC."""
    import torch

    torch.npu.synchronize(worker.device)
    return True


def replace_release_barrier(original: Any) -> Any:
    """Return ``release_barrier``; a plain function, because it is pickled by name."""
    return release_barrier
