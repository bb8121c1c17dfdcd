"""The driver that says there is a device; the interpreter launches kernels without it."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):  # type: ignore[misc]
    """The CPU, as far as Triton's interpreter needs it."""

    @classmethod
    def is_active(cls) -> bool:
        """Always: it is installed where there is nothing else."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        """Raise: launching compiled code was asked for."""
        raise NotImplementedError("kernels run in Triton's interpreter on this machine")

    def get_current_target(self) -> Any:
        """Name the target of compiled code, of which there is none."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        """Return where tensors lie."""
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Time a call once: an interpreted kernel has no variant worth choosing."""

        def benchmark(kernel_call: Any, *, quantiles: list[float], **kwargs: Any) -> list[float]:
            kernel_call()
            return [0.0 for _ in quantiles]

        return benchmark
