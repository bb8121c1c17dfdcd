"""In an environment on the emulated device: what is done when torch, Triton and vLLM are imported.

Nothing of them is changed on disk, and nothing of kvpatch is here.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any


GRAIN = 256  # bytes that order.cpp looks at as one


class Access(ctypes.Structure):
    """``emu_access`` of work.h."""

    _fields_ = (("at", ctypes.c_size_t), ("size", ctypes.c_size_t), ("write", ctypes.c_bool))


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
    """Queue kernels on the stream, and let them say which memory they use.

    They work on the device's own memory, not on copies of whole tensors.
    """
    import numpy as np
    import torch

    device = ctypes.CDLL("libcuda.so.1")
    device.emu_watched.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    device.emu_watched.restype = ctypes.c_bool
    queued: dict[int, Callable[[], None]] = {}
    numbers = itertools.count(1)
    one_at_a_time = threading.Lock()  # the interpreter is one, and streams are many

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def run(number: int) -> None:
        work = queued.pop(number)
        try:
            with one_at_a_time:
                work()
        except BaseException as error:
            device.emu_fail(f"a Triton kernel: {error!r}".encode())

    def alias(value: Any) -> Any:
        if isinstance(value, tuple):
            return interpreter._tuple_create(value, map(alias, value))
        is_cuda = isinstance(value, torch.Tensor) and value.is_cuda
        return torch.ops.emu.host(value) if is_cuda else value

    call = interpreter.GridExecutor.__call__

    def queue(self: Any, *given: Any, **named: Any) -> None:
        given = tuple(map(alias, given))
        named = {name: alias(value) for name, value in named.items()}
        number = next(numbers)
        queued[number] = lambda: call(self, *given, **named)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        name = f"Triton's {self.fn.__name__}".encode()
        device.emu_enqueue(stream, name, None, 0, run, ctypes.c_void_p(number), True)

    atexit.register(device.cuCtxSynchronize)  # while there is a Python to run what is queued
    interpreter.GridExecutor.__call__ = queue
    interpreter.GridExecutor._init_args_hst = lambda self, given, named: (given, named)
    interpreter.GridExecutor._restore_args_dev = lambda *given, **named: None

    def touch(pointers: Any, mask: Any, size: int, write: bool) -> None:
        used = np.asarray(pointers)[np.broadcast_to(mask, np.shape(pointers))].astype(np.uint64)
        if not used.size:
            return
        first, last = int(used.min()), int(used.max()) + size
        if not device.emu_watched(first, last - first):
            return
        grains = np.unique(used // GRAIN)
        accesses = (Access * len(grains))()
        for access, grain in zip(accesses, grains, strict=True):
            access.at, access.size, access.write = int(grain) * GRAIN, GRAIN, write
        device.emu_touch(accesses, len(grains))

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def loads(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        touch(ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8, False)
        return load(self, ptrs, mask, *rest, **named)

    def stores(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        touch(ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8, True)
        return store(self, ptrs, value, mask, *rest, **named)

    builder.create_masked_load, builder.create_masked_store = loads, stores


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
