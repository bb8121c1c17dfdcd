"""The host device's copies for vLLM up to 0.24, which has one handler per direction."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvpatch.upstream.vllm_api import by_group, find

Transfer = tuple[Any, Any]

CPULoadStoreSpec, GPULoadStoreSpec = find("CPULoadStoreSpec"), find("GPULoadStoreSpec")
if TYPE_CHECKING:
    from vllm.v1.kv_offload.worker.worker import OffloadingHandler

    from kvpatch.hostdevice.offloading import HostOffloadingWorker
else:
    OffloadingHandler = find("OffloadingHandler")


class HostHandler(OffloadingHandler):  # type: ignore[misc]
    """One direction of a worker.

    Args:
        worker: performs the copies.
        store: whether the direction is to the CPU tier.
    """

    def __init__(self, worker: HostOffloadingWorker, store: bool) -> None:
        self._worker = worker
        self._store = store

    def transfer_async(self, job_id: int, spec: Transfer) -> bool:
        """Queue a transfer from the first to the second of ``spec``."""
        source, destination = spec
        per_row = self._worker.blocks_per_chunk
        if self._store:
            return self._worker.submit_store(job_id, by_group(source, per_row), destination)
        return self._worker.submit_load(job_id, source, by_group(destination, per_row))

    def get_finished(self) -> list[Any]:
        """Return the transfers of this direction that ended since the last call."""
        results: list[Any] = self._worker.finished(self._store)
        for result in results:
            # Up to 0.23 a transfer without this attribute is not counted.
            result.transfer_type = ("GPU", "CPU") if self._store else ("CPU", "GPU")
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the copies of these jobs have run."""
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        """Finish the copies in flight; the store handler does this for both."""
        if self._store:
            self._worker.shutdown()


def regions_of(kv_caches: dict[str, Any], backends: dict[str, Any]) -> Any:
    """Return the KV caches that vLLM up to 0.18 passes, by layer, as the regions of one group."""
    import torch

    tensors = []
    for name, cache in kv_caches.items():
        # Blocks are the first dimension, or the second after K and V.
        first = backends[name].get_kv_cache_shape(1234, 16, 8, 256)[0] == 1234
        for part in (cache,) if first else cache.unbind(0):
            rows = part.view(len(part), -1).view(torch.int8)
            tensors.append(SimpleNamespace(tensor=rows, page_size_bytes=rows.shape[1]))
    refs = [
        SimpleNamespace(tensor_idx=index, page_size_bytes=entry.page_size_bytes)
        for index, entry in enumerate(tensors)
    ]
    return SimpleNamespace(tensors=tensors, group_data_refs=[refs])


def of(worker: HostOffloadingWorker) -> Iterator[tuple[type, type, HostHandler]]:
    """Yield (source, destination, handler), as ``OffloadingSpec.get_handlers`` does."""
    yield GPULoadStoreSpec, CPULoadStoreSpec, HostHandler(worker, store=True)
    yield CPULoadStoreSpec, GPULoadStoreSpec, HostHandler(worker, store=False)
