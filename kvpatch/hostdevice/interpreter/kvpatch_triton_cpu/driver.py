"""A driver that reports an active device; the interpreter launches kernels without it."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):  # type: ignore[misc]
    """The CPU as a device, as far as Triton's interpreter needs it."""

    @classmethod
    def is_active(cls) -> bool:
        """Return True: it is installed only where there is no other device."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        """Raise NotImplementedError: no compiled code is launched."""
        raise NotImplementedError("kernels run in Triton's interpreter on this machine")

    def get_current_target(self) -> Any:
        """Return a target for compiled code, which is never used."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        """Return the device of tensors."""
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Return a benchmark that calls a kernel once: interpreted kernels are not tuned."""

        def benchmark(kernel_call: Any, *, quantiles: list[float], **kwargs: Any) -> list[float]:
            kernel_call()
            return [0.0 for _ in quantiles]

        return benchmark
