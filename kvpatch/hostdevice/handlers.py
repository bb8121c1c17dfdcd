"""The host device's copies for vLLM up to 0.24, which has a handler for each direction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler

from kvpatch.hostdevice.offloading import HostOffloadingWorker

Transfer = tuple[Any, Any]


class HostHandler(OffloadingHandler):  # type: ignore[misc]
    """One direction of a worker.

    Args:
        worker: does the copies.
        store: whether this is the direction to the CPU tier.
    """

    def __init__(self, worker: HostOffloadingWorker, store: bool) -> None:
        self._worker = worker
        self._store = store

    def transfer_async(self, job_id: int, spec: Transfer) -> bool:
        """Queue a transfer from the first to the second of ``spec``."""
        submit = self._worker.submit_store if self._store else self._worker.submit_load
        return submit(job_id, *spec)

    def get_finished(self) -> list[Any]:
        """Return the transfers of this direction that ended since the last call."""
        return self._worker.finished(self._store)

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the copies of these jobs have run."""
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        """Finish the copies in flight; one of the two handlers does it for both."""
        if self._store:
            self._worker.shutdown()


def of(worker: HostOffloadingWorker) -> Iterator[tuple[type, type, HostHandler]]:
    """Yield what ``OffloadingSpec.get_handlers`` does: source, destination and handler."""
    yield GPULoadStoreSpec, CPULoadStoreSpec, HostHandler(worker, store=True)
    yield CPULoadStoreSpec, GPULoadStoreSpec, HostHandler(worker, store=False)
