"""SimpleCPUOffloadConnector's copies on the host device.

vLLM's worker uses streams and events of ``torch``, which has none on a CPU, and
copies with CUDA's batched memcpy. Here both are the host device's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import wrapt

from kvpatch.hostdevice import streams


class CopyEvent:
    """The end of a copy; raises the error of a copy that failed."""

    def __init__(self, event: streams.Event) -> None:
        self._event = event

    def query(self) -> bool:
        """Whether the copy has ended."""
        if not self._event.query():
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait for the copy."""
        self._event.synchronize()
        if self._event.error is not None:
            raise self._event.error


class _ComputeEvent:
    """A point in the compute stream, which is the calling thread: already reached."""

    def record(self, stream: object = None) -> None:
        """Mark the point."""


class _Stream(streams.Stream):
    """A copy stream as vLLM's worker creates it; priorities have no effect on threads."""

    def __init__(self, priority: int = 0) -> None:
        super().__init__("kvpatch-simple-copies")

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return (lowest, highest), as ``torch.cuda.Stream`` does."""
        return 0, 0


class _Cuda:
    Stream = _Stream

    @staticmethod
    def current_stream() -> None:
        """Return None: the compute stream has no object here."""


class TorchWithStreams(wrapt.ObjectProxy):  # type: ignore[misc]
    """``torch`` with the host device's streams and events."""

    cuda = _Cuda
    Event = _ComputeEvent


class HostCopyBackend:
    """Copies rows of the regions on the host device's streams.

    The interface is ``kvpatch.patches.simple_offload.copy_backend.CopyBackend``.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._load: Any = None
        self._store: Any = None

    def init(
        self,
        gpu_caches: dict[str, Any],
        cpu_caches: dict[str, Any],
        device: Any,
        load_stream: Any,
        store_stream: Any,
    ) -> None:
        """Set the regions of both sides: int8 of ``[blocks, bytes]``, by the same names."""
        self._pairs = [(gpu_caches[name], cpu_caches[name]) for name in gpu_caches]
        self._load, self._store = load_stream, store_stream

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        """Queue one copy; ``(event_idx, event)`` is appended to ``events_list`` immediately.

        Raises:
            IndexError: a block does not exist.
        """
        copies: list[tuple[int, int, int]] = []
        for gpu, cpu in self._pairs:
            source, destination = (gpu, cpu) if is_store else (cpu, gpu)
            for one, other in zip(src_blocks, dst_blocks, strict=True):
                copies.append((_row(destination, other), _row(source, one), gpu.shape[1]))

        def copy() -> None:
            for destination, source, size in copies:
                ctypes.memmove(destination, source, size)

        stream = self._store if is_store else self._load
        events_list.append((event_idx, CopyEvent(stream.submit(copy))))

    def shutdown(self) -> None:
        """Finish the launched copies and end the streams."""
        self._load.close()
        self._store.close()


def _row(region: Any, row: int) -> int:
    if not 0 <= row < region.shape[0]:
        raise IndexError(f"block {row} does not exist")
    return int(region.data_ptr() + row * region.stride(0))
