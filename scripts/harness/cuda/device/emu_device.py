"""In an environment on the emulated device: what is done when torch, Triton and vLLM are imported.

Nothing of them is changed on disk, and nothing of kvpatch is here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def of_torch(torch: Any) -> None:
    """Put the CPU's operators on the device; attention is what the CPU has."""
    torch.ops.load_library(f"{os.environ['EMU_LIBRARIES']}/libemu_operators.so")
    torch.ops.emu.install()
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


def of_driver(driver: Any) -> None:
    """There is a GPU for Triton, though it compiles nothing for it."""
    driver.CudaDriver.is_active = staticmethod(lambda: True)


def of_interpreter(interpreter: Any) -> None:
    """Kernels work on the device's own memory, not on copies of whole tensors.

    What ``tl.range`` counts is a tensor in a kernel, and an integer in the interpreter alone.
    """
    import torch

    def alias(value: Any) -> Any:
        if isinstance(value, tuple):
            return interpreter._tuple_create(value, map(alias, value))
        is_cuda = isinstance(value, torch.Tensor) and value.is_cuda
        return torch.ops.emu.host(value) if is_cuda else value

    def arguments(self: Any, given: Any, named: dict[str, Any]) -> Any:
        return [*map(alias, given)], {name: alias(value) for name, value in named.items()}

    patch = interpreter._patch_lang_core

    def with_range(lang: Any, scope: Any) -> None:
        patch(lang, scope)
        counted = lang.range

        def tensors(*bounds: Any, **how: Any) -> Any:
            return map(interpreter._implicit_cvt, counted(*bounds, **how))

        scope.set_attr(lang, "range", tensors)

    interpreter._patch_lang_core = with_range
    interpreter.GridExecutor._init_args_hst = arguments
    interpreter.GridExecutor._restore_args_dev = lambda *given, **named: None


def of_vllm(module: Any) -> None:
    """Put those of vLLM's operators that are emulated on the device."""
    import torch

    torch.ops.emu.install()


HOOKS: dict[str, Callable[[Any], None]] = {
    "torch": of_torch,
    "triton.backends.nvidia.driver": of_driver,
    "triton.runtime.interpreter": of_interpreter,
    "vllm._custom_ops": of_vllm,
    "vllm.vllm_flash_attn.flash_attn_interface": of_vllm,
}


class Late:
    """For ``--worker-extension-cls emu_device.Late``: a server's device is late in another way."""

    def be_late(self, kind: int, seed: int) -> None:
        """Let work be late from now on: see ``emu_delay``."""
        import ctypes

        ctypes.CDLL("libcuda.so.1").emu_delay(kind, seed)


class Finder:
    """Runs a hook behind the import of its module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module with a hook, as other finders have it."""
        if name not in HOOKS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def with_hook(module: ModuleType) -> None:
            execute(module)
            HOOKS[name](module)

        spec.loader.exec_module = with_hook  # type: ignore[method-assign]
        return spec


def start() -> None:
    """Wait for the imports."""
    sys.meta_path.insert(0, Finder())
