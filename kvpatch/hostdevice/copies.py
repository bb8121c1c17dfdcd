"""What vLLM's copy code calls of CUDA, on the host device: streams, events, copies, pinning.

vLLM's own workers for the CPU tier run unmodified on it. Their modules see ``torch``,
``current_platform`` and ``vllm._custom_ops`` through the proxies below, and the regions of the
device as tensors that call themselves CUDA's. Everything else in those names is the original.

What a GPU has and this has not: copies that run while the engine computes on the same bytes
in another order than the streams say, kernels that read pinned memory, and a link of its own
speed. See docs/host-device.md.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import wrapt

from kvpatch.hostdevice import streams
from kvpatch.patch import argument

SUCCESS = 0
INVALID_VALUE = 1
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713


class ComputeStream:
    """The stream of the computation: the calling thread, whose work is always complete."""

    def synchronize(self) -> None:
        """Return; there is nothing to wait for."""


class CopyStream:
    """A ``torch.cuda.Stream`` for copies, in order; after a failed one every event fails."""

    _handles = itertools.count(1)
    _by_handle: ClassVar[weakref.WeakValueDictionary[int, CopyStream]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = next(self._handles)
        self._by_handle[self.cuda_stream] = self
        self._stream = streams.Stream("kvpatch-copies")
        self._last: streams.Event | None = None
        self._after: list[streams.Event] = []
        self._failure: BaseException | None = None

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority, which have no effect on threads."""
        return 0, 0

    @classmethod
    def of(cls, handle: int) -> CopyStream | None:
        """Return the stream with this handle."""
        return cls._by_handle.get(handle)

    def enqueue(self, copies: Iterable[tuple[int, int, int]] = ()) -> streams.Event:
        """Queue copies (destination, source, bytes); return the event of their completion."""

        def run() -> None:
            if self._failure is None:
                try:
                    for destination, source, size in copies:
                        ctypes.memmove(destination, source, size)
                except BaseException as failure:
                    self._failure = failure
            if self._failure is not None:
                raise self._failure

        after, self._after = self._after, []
        self._last = self._stream.submit(run, after)
        return self._last

    def wait_stream(self, other: Any) -> None:
        """Run what is queued from now on after what ``other`` has queued."""
        if isinstance(other, CopyStream) and other._last is not None:
            self._after.append(other._last)

    def wait_event(self, event: CopyEvent) -> None:
        """Run what is queued from now on after ``event``."""
        if event.point is not None:
            self._after.append(event.point)

    def synchronize(self) -> None:
        """Wait for everything queued so far."""
        self._stream.synchronize()
        if self._failure is not None:
            raise self._failure


class CopyEvent:
    """A point in a stream, as ``torch.Event``; it can be recorded again."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.point: streams.Event | None = None

    def record(self, stream: Any = None) -> None:
        """Record it behind what ``stream``, or the current stream, has queued."""
        stream = current_stream() if stream is None else stream
        self.point = stream.enqueue() if isinstance(stream, CopyStream) else None

    def query(self) -> bool:
        """Whether the point was reached; raises the error of a copy before it that failed."""
        if self.point is None:
            return True
        if not self.point.query():
            return False
        if self.point.error is not None:
            raise self.point.error
        return True

    def synchronize(self) -> None:
        """Wait for the point; raises as ``query``."""
        if self.point is not None:
            self.point.synchronize()
            self.query()

    def elapsed_time(self, end: CopyEvent) -> float:
        """Return the milliseconds from this point to ``end``; both were reached."""
        if self.point is None or end.point is None:
            raise RuntimeError("an event that was not recorded on a copy stream has no time")
        return (end.point.time - self.point.time) * 1e3


_COMPUTE = ComputeStream()
_current = threading.local()


def current_stream(*device: Any) -> Any:
    """Return the stream of the innermost ``stream`` block, or the computation's."""
    return getattr(_current, "stream", _COMPUTE)


@contextmanager
def stream(on: Any) -> Iterator[None]:
    """Queue the copies of the block on a stream."""
    before = current_stream()
    _current.stream = on
    try:
        yield
    finally:
        _current.stream = before


def swap_blocks_batch(
    src_ptrs: Any, dst_ptrs: Any, sizes: Any, is_src_access_order_any: bool = False
) -> None:
    """Queue copies between addresses as ``ops.swap_blocks_batch``; int64 tensors of one length."""
    copies = list(zip(dst_ptrs.tolist(), src_ptrs.tolist(), sizes.tolist(), strict=True))
    _enqueue(copies)


def swap_blocks(src: Any, dst: Any, block_size_in_bytes: int, block_mapping: Any) -> None:
    """Queue copies of whole blocks, as ``ops.swap_blocks``: int64 pairs of ``src`` and ``dst``."""
    size, source, destination = block_size_in_bytes, src.data_ptr(), dst.data_ptr()
    _enqueue(
        [(destination + to * size, source + of * size, size) for of, to in block_mapping.tolist()]
    )


def memcpy_batch(
    dsts: int,
    srcs: int,
    sizes: int,
    count: int,
    attrs: int,
    attrs_idx: Any,
    num_attrs: int,
    fail_idx: Any,
    handle: int,
) -> int:
    """Queue copies between addresses, as ``cuMemcpyBatchAsync``; returns CUDA's error code.

    The arrays have ``count`` uint64, which are read at once. The first field of the attributes says
    when the sources may be read: 1 in stream order, as always here, 2 during the call, 3 at any
    time.
    """
    on = CopyStream.of(handle)
    if on is None or not count:
        return INVALID_VALUE
    if num_attrs and ctypes.c_uint.from_address(attrs).value not in (1, 2, 3):
        return INVALID_VALUE
    array = ctypes.c_uint64 * count
    arrays = (array.from_address(address) for address in (dsts, srcs, sizes))
    on.enqueue(list(zip(*arrays, strict=True)))
    return SUCCESS


def _enqueue(copies: list[tuple[int, int, int]]) -> None:
    on = current_stream()
    if isinstance(on, CopyStream):
        on.enqueue(copies)
        return
    for destination, source, size in copies:
        ctypes.memmove(destination, source, size)


class HostRegistration:
    """``cudaHostRegister`` of the host device: it counts, and is as strict as CUDA about ranges."""

    ranges: ClassVar[dict[int, int]] = {}  # bytes by base address, in this process

    def cudaHostRegister(self, address: int, size: int, flags: int = 0) -> Any:  # noqa: N802
        """Register a range of host memory; returns CUDA's error code."""
        if not address or size <= 0:
            return _code(INVALID_VALUE)
        if any(
            base < address + size and address < base + there for base, there in self.ranges.items()
        ):
            return _code(ALREADY_REGISTERED)
        self.ranges[address] = size
        return _code(SUCCESS)

    def cudaHostUnregister(self, address: int) -> Any:  # noqa: N802
        """Deregister the range that begins at ``address``; returns CUDA's error code."""
        known = self.ranges.pop(address, None)
        return _code(SUCCESS if known is not None else NOT_REGISTERED)

    def cudaGetLastError(self) -> Any:  # noqa: N802
        """Return the last error; codes are returned where they arise."""
        return _code(SUCCESS)


class _Code(int):
    """An error code, compared by vLLM as an int or by its ``value``."""

    @property
    def value(self) -> int:
        return int(self)


def _code(number: int) -> _Code:
    return _Code(number)


class DeviceTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor in the device's memory: it, and views of it, say ``is_cuda``."""

    is_cuda = True


class _Cuda(wrapt.ObjectProxy):  # type: ignore[misc]
    Stream = CopyStream
    current_stream = staticmethod(current_stream)
    stream = staticmethod(stream)
    cudart = HostRegistration


def current_device_index() -> int:
    """Return the device of this worker: each rank of a machine has its own."""
    from vllm.distributed import parallel_state

    return int(parallel_state.get_world_group().local_rank)


class _Torch(wrapt.ObjectProxy):  # type: ignore[misc]
    """``torch`` with the host device's streams, events and pinned memory."""

    Event = CopyEvent
    accelerator = SimpleNamespace(
        synchronize=streams.synchronize, current_device_index=current_device_index
    )

    @property
    def cuda(self) -> Any:
        return _Cuda(self.__wrapped__.cuda)

    def zeros(self, *args: Any, pin_memory: bool = False, **options: Any) -> Any:
        """As ``torch.zeros``; all memory of the host device's process is reachable."""
        return self.__wrapped__.zeros(*args, **options)

    def empty(self, *args: Any, pin_memory: bool = False, **options: Any) -> Any:
        """As ``torch.empty``; all memory of the host device's process is reachable."""
        return self.__wrapped__.empty(*args, **options)


class _Platform(wrapt.ObjectProxy):  # type: ignore[misc]
    """``current_platform`` as it is on a GPU, as far as copies ask."""

    Stream = CopyStream
    current_stream = staticmethod(current_stream)
    stream = staticmethod(stream)

    def is_cuda_alike(self) -> bool:
        """Return True."""
        return True

    def set_device(self, device: Any) -> None:
        """Make ``device`` this thread's; a process of the host device has one."""


class _Operations(wrapt.ObjectProxy):  # type: ignore[misc]
    swap_blocks = staticmethod(swap_blocks)
    swap_blocks_batch = staticmethod(swap_blocks_batch)


def in_force(module: Any) -> bool:
    """Whether ``module``, the ``torch`` of one of vLLM's modules, is the host device's."""
    return isinstance(module, _Torch)


def torch_with_streams(original: Any) -> Any:
    """Replace ``torch`` in one module of vLLM only."""
    return _Torch(original)


def platform_with_streams(original: Any) -> Any:
    """Replace ``current_platform`` in one module of vLLM only."""
    return _Platform(original)


def operations_with_copies(original: Any) -> Any:
    """Replace ``vllm._custom_ops`` in one module of vLLM only."""
    return _Operations(original)


def host_registration(original: Any) -> Any:
    """Replace ``CudaRTLibrary`` in one module of vLLM only."""
    return HostRegistration


def batched_copies(original: Any) -> Any:
    """Replace ``_resolve_batch_memcpy``, which returns the function and how many attributes."""
    return lambda: (memcpy_batch, 1)


def pinned(original: Any) -> bool:
    """Replace ``PIN_MEMORY``: as on a GPU, the CPU tier is pinned."""
    return True


def pinned_as_asked(original: Any) -> Any:
    """Replace ``is_pin_memory_available``, as ``pinned``."""
    return lambda: True


def on_device(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Give vLLM's worker, whose ``kv_caches`` are ``CanonicalKVCaches``, tensors on a device."""
    caches = argument(args, kwargs, 0, "kv_caches")
    moved = replace(
        caches,
        tensors=[
            replace(entry, tensor=entry.tensor.as_subclass(DeviceTensor))
            for entry in caches.tensors
        ],
    )
    if "kv_caches" in kwargs:
        return wrapped(*args, **{**kwargs, "kv_caches": moved})
    return wrapped(moved, *args[1:], **kwargs)
