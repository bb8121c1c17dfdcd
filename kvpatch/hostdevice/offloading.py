"""vLLM's CPU offloading on the host device, through vLLM's plug-in interface for specs.

Configured as ``spec_name=HostOffloadingSpec`` with
``spec_module_path=kvpatch.hostdevice.offloading`` in ``kv_connector_extra_config``.
The scheduler side (LRU, ARC, sizes) is vLLM's ``CPUOffloadingSpec`` unchanged; only
the copies, which vLLM implements with CUDA streams, are the host device's. It supports
static KV memory as well as kvcached's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvpatch.hostdevice.streams import Event, Stream
from kvpatch.upstream.vllm_api import blocks_per_chunk, chunks_of, find, places

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        TransferResult,
    )
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
else:
    CPUOffloadingSpec, TransferResult = find("CPUOffloadingSpec"), find("TransferResult")
try:
    from vllm.v1.kv_offload.base import OffloadingWorker
except ImportError:  # up to 0.24 one handler per direction: see ``legacy``
    OffloadingWorker = object


@dataclass
class _Transfer:
    job_id: int
    size: int
    begun: Event
    done: Event


class _Direction:
    """Copies in one direction, in the order in which they are submitted."""

    def __init__(self, name: str) -> None:
        self.stream = Stream(name)
        self.pending: dict[int, _Transfer] = {}

    def submit(self, job_id: int, copies: list[tuple[int, int, int]]) -> None:
        begun = self.stream.submit(lambda: None)

        def copy() -> None:
            for destination, source, size in copies:
                ctypes.memmove(destination, source, size)

        done = self.stream.submit(copy)
        size = sum(size for _, _, size in copies)
        self.pending[job_id] = _Transfer(job_id, size, begun, done)

    def finished(self) -> list[TransferResult]:
        results = []
        for transfer in list(self.pending.values()):
            if not transfer.done.query():
                break
            del self.pending[transfer.job_id]
            if transfer.done.error is not None:
                raise transfer.done.error
            results.append(
                TransferResult(
                    job_id=transfer.job_id,
                    success=True,
                    transfer_size=transfer.size,
                    transfer_time=transfer.done.time - transfer.begun.time,
                )
            )
        return results


def _view(shared: SharedOffloadRegion, size: int) -> Any:
    """Return this worker's next part of the shared CPU tier: rows of ``size`` bytes."""
    # vLLM 0.28 also has views of all workers, and renamed this one.
    of_worker = getattr(shared, "create_next_worker_view", None)
    return of_worker(size) if of_worker is not None else shared.create_next_view(size)


class HostOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between the device's regions and a CPU tier of the same geometry.

    Args:
        kv_caches: regions of shape ``[num_blocks, page_bytes]`` and, per group, the
            regions that its blocks consist of.
        blocks_per_chunk: device blocks per block of the CPU tier.
        num_cpu_blocks: blocks of the CPU tier.
        shared: vLLM's shared memory for a CPU tier that other processes access too;
            without it the tier is private to this process.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_cpu_blocks: int,
        shared: SharedOffloadRegion | None = None,
    ) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.regions = [
            entry.tensor.view(torch.int8).view(-1, entry.page_size_bytes)
            for entry in kv_caches.tensors
        ]
        self.groups = kv_caches.group_data_refs
        self.shared = shared
        sizes = [region.shape[1] * blocks_per_chunk for region in self.regions]
        self.tier = [
            torch.zeros((num_cpu_blocks, size), dtype=torch.int8)
            if shared is None
            else _view(shared, size)
            for size in sizes
        ]
        self._store = _Direction("kvpatch-store")
        self._load = _Direction("kvpatch-load")

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Queue copies from the device to the CPU tier."""
        pairs = self._addresses(src_spec, dst_spec)
        self._store.submit(job_id, [(tier, device, size) for device, tier, size in pairs])
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Queue copies from the CPU tier to the device."""
        self._load.submit(job_id, self._addresses(dst_spec, src_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call."""
        return self.finished(store=True) + self.finished(store=False)

    def finished(self, store: bool) -> list[TransferResult]:
        """Return the transfers of one direction that ended since the last call."""
        return (self._store if store else self._load).finished()

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the copies of these jobs have run."""
        for direction in (self._store, self._load):
            for job_id in job_ids & direction.pending.keys():
                direction.pending[job_id].done.synchronize()

    def shutdown(self) -> None:
        """Finish the copies in flight, then release the tier's memory."""
        for direction in (self._store, self._load):
            direction.stream.close()
        self.tier.clear()
        if self.shared is not None:
            self.shared.cleanup()

    def _addresses(self, device: Any, tier: Any) -> list[tuple[int, int, int]]:
        """Pair device addresses with tier addresses: (device, tier, bytes) per copy."""
        pairs = []
        for block, place in places(device, tier, self.blocks_per_chunk):
            for ref in self.groups[place.group]:
                region, rows = self.regions[ref.tensor_idx], self.tier[ref.tensor_idx]
                if not (0 <= block < region.shape[0] and 0 <= place.chunk < rows.shape[0]):
                    raise IndexError(f"block {block} or tier block {place.chunk} does not exist")
                pairs.append(
                    (
                        region.data_ptr() + block * region.stride(0),
                        rows.data_ptr()
                        + place.chunk * rows.stride(0)
                        + place.inside * region.shape[1],
                        ref.page_size_bytes,
                    )
                )
        return pairs


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPU offloading spec with the host device's copies."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker that copies ``kv_caches``; called once per worker process."""
        made: HostOffloadingWorker | None = getattr(self, "_worker", None)
        self._worker: Any = made or HostOffloadingWorker(
            kv_caches, blocks_per_chunk(self), chunks_of(self)
        )
        return self._worker

    def get_handlers(self, kv_caches: Any, attn_backends: Any = None) -> Any:
        """Return the worker as one handler per direction, the interface of vLLM up to 0.24."""
        from kvpatch.hostdevice import legacy

        if attn_backends is not None:  # up to 0.18
            kv_caches = legacy.regions_of(kv_caches, attn_backends)
        return legacy.of(self.get_worker(kv_caches))
