"""The copy backend of SimpleCPUOffloadConnector on this device.

vLLM's worker needs two things of a device: the class that copies blocks, and the
streams and events of ``torch``. On CUDA and ROCm both are vLLM's own;
another device brings its own pair here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvpatch.upstream.vllm_api import device_type


class CopyBackend(Protocol):
    """What vLLM's worker asks of the class that copies blocks.

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
        """Take the regions of both sides, int8 of ``[blocks, bytes]`` under equal names."""

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        """Copy rows of every region, in the order of the launches of one direction.

        Appends ``(event_idx, event)`` to ``events_list``; the event's ``query`` says
        whether the copy has ended, and ``synchronize`` waits for it. A store must not
        begin before ``wait_event``.
        """

    def shutdown(self) -> None:
        """Launch what is queued, and take no more."""


@dataclass(frozen=True)
class Device:
    """How the connector's blocks are copied on one kind of device.

    Attributes:
        backend: from vLLM's class to the one that copies.
        torch: from ``torch`` to the ``torch`` that vLLM's worker module sees.
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
    """Replace the ``torch`` that vLLM's worker module sees by this device's."""
    device = DEVICES.get(device_type())
    return torch if device is None else device.torch(torch)
