"""The copy backend of SimpleCPUOffloadConnector on this device.

vLLM's worker depends on the device in two ways: the class that copies blocks, and the
streams and events of ``torch``. On CUDA and ROCm both are unchanged; another device
provides its own pair here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvpatch.upstream.vllm_api import device_type


class CopyBackend(Protocol):
    """The interface that vLLM's worker requires of the class that copies blocks.

    Source: ``DmaCopyBackend`` in ``vllm/v1/simple_kv_offload/copy_backend.py``.
    """

    def init(
        self,
        gpu_caches: dict[str, Any],
        cpu_caches: dict[str, Any],
        device: Any,
        load_stream: Any,
        store_stream: Any,
    ) -> None:
        """Set the regions of both sides: int8 of ``[blocks, bytes]``, by the same names."""

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        """Copy rows of every region, in launch order per direction.

        Appends ``(event_idx, event)`` to ``events_list``; the event's ``query`` returns
        whether the copy has completed, and ``synchronize`` waits for it. A store must not
        start before ``wait_event``.
        """

    def shutdown(self) -> None:
        """Launch the queued copies, and accept no more."""


@dataclass(frozen=True)
class Device:
    """How the connector's blocks are copied on one kind of device.

    Attributes:
        backend: maps vLLM's copy backend to the one in use.
        torch: maps ``torch`` to the object that vLLM's worker module uses in its place.
    """

    backend: Callable[[Any], Any]
    torch: Callable[[Any], Any]


def _host_backend(original: Any) -> Any:
    from kvpatch.hostdevice.simple_copies import HostCopyBackend

    return HostCopyBackend


def _host_torch(torch: Any) -> Any:
    from kvpatch.hostdevice.simple_copies import TorchWithStreams

    return TorchWithStreams(torch)


# By ``Facts.device``; a rule refuses the others (KVP318).
DEVICES = {
    "cuda": Device(lambda original: original, lambda torch: torch),
    "cpu": Device(_host_backend, _host_torch),
}


def backend_here(original: Any) -> Any:
    """Replace vLLM's ``DmaCopyBackend`` by the backend of this device."""
    device = DEVICES.get(device_type())
    return original if device is None else device.backend(original)


def torch_here(torch: Any) -> Any:
    """Replace the ``torch`` of vLLM's worker module by this device's."""
    device = DEVICES.get(device_type())
    return torch if device is None else device.torch(torch)
