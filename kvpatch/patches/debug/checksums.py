"""Debug mode: every stored block is summed and checked, every unmapping is looked at.

With ``KVPATCH_DEBUG=1`` a block is summed when its store is handed to the worker, and
again when the copy is launched and when the block is loaded; before a page is unmapped,
vLLM's own record of transfers is searched for its blocks. What must not happen stops
the engine with the block, page, job and request. It reads every block twice more, so
that it is for finding faults and not for service.
"""

from __future__ import annotations

import zlib
from typing import Any

from kvpatch.environ import DEBUG
from kvpatch.patch import argument
from kvpatch.upstream import connectors
from kvpatch.upstream.vllm_api import Place, places


class Violation(RuntimeError):
    """Stops an engine in debug mode: something touched memory that it must not touch."""

    def __init__(self, what: str, block: int, page: int | str, job: int, request: str) -> None:
        super().__init__(
            f"kvpatch {DEBUG}: {what}: block {block} of page {page}, job {job}, request {request}"
        )


def wanted() -> bool:
    """Whether the operator asked for it."""
    return DEBUG.is_on()


class AuditedWorker:
    """An ``OffloadingWorker`` that sums what it copies; everything else is the worker's own.

    Args:
        worker: the worker of the spec in use.
        kv_caches: the regions, as vLLM's ``CanonicalKVCaches``.
        blocks_per_chunk: device blocks in one block of the tier.
    """

    def __init__(self, worker: Any, kv_caches: Any, blocks_per_chunk: int) -> None:
        self._worker = worker
        self._blocks_per_chunk = blocks_per_chunk
        self._regions = [
            [kv_caches.tensors[ref.tensor_idx].tensor for ref in group]
            for group in kv_caches.group_data_refs
        ]
        self._handed: dict[int, dict[Place, int]] = {}
        self._stored: dict[Place, int] = {}
        self._loading: dict[int, list[tuple[int, Place]]] = {}
        self._requests: dict[int, str] = {}
        self.blocks_per_page = 0
        self.checked = {"stored": 0, "loaded": 0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def sum_of(self, group: int, block: int) -> int:
        """The checksum of a block over its group's regions."""
        total = 0
        for region in self._regions[group]:
            total = zlib.crc32(region[block].cpu().numpy(), total)
        return total

    def note_request(self, job_id: int, request: str) -> None:
        """Remember whose transfer a job is."""
        self._requests[job_id] = request

    def hand_off(self, job_id: int, device: Any, tier: Any) -> None:
        """Sum the blocks of a store that is planned and not launched yet."""
        pairs = places(device, tier, self._blocks_per_chunk)
        self._handed[job_id] = {place: self.sum_of(place.group, block) for block, place in pairs}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Check that the blocks are still what they were, and launch the copy."""
        if job_id not in self._handed:  # flushed in the step that planned it
            self.hand_off(job_id, src_spec, dst_spec)
        sums = self._handed.pop(job_id)
        for block, place in places(src_spec, dst_spec, self._blocks_per_chunk):
            if self.sum_of(place.group, block) != sums[place]:
                raise self._violation(
                    "a block changed before its store was launched", block, job_id
                )
            self.checked["stored"] += 1
        self._stored |= sums
        return bool(self._worker.submit_store(job_id, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Launch a load; its blocks are checked when it has ended."""
        self._loading[job_id] = list(places(dst_spec, src_spec, self._blocks_per_chunk))
        return bool(self._worker.submit_load(job_id, src_spec, dst_spec))

    def get_finished(self) -> Any:
        """Return the transfers that ended; a load must have brought what was stored."""
        finished = self._worker.get_finished()
        for result in finished:
            for block, place in self._loading.pop(result.job_id, []):
                if self.sum_of(place.group, block) != self._stored.get(place):
                    raise self._violation(
                        "a load brought other bytes than were stored", block, result.job_id
                    )
                self.checked["loaded"] += 1
            self._requests.pop(result.job_id, None)
        return finished

    def _violation(self, what: str, block: int, job_id: int) -> Violation:
        page = block // self.blocks_per_page if self.blocks_per_page else "unknown"
        return Violation(what, block, page, job_id, self._requests.get(job_id, "unknown"))


def around_init_worker(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Put the audit around the worker of the offloading spec.

    Wraps ``OffloadingConnectorWorker._init_worker(kv_caches)``.
    """
    wrapped(*args, **kwargs)
    kv_caches = argument(args, kwargs, 0, "kv_caches")
    instance.worker = AuditedWorker(instance.worker, kv_caches, instance.spec.blocks_per_chunk)


def around_prepare_store(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Sum the blocks of new stores; their compute has been launched by now.

    Wraps ``OffloadingConnectorWorker.prepare_store_kv(metadata)``.
    """
    metadata = argument(args, kwargs, 0, "metadata")
    for job_id, entry in metadata.store_jobs.items():
        instance.worker.note_request(job_id, entry.req_id)
        instance.worker.hand_off(job_id, entry.src_spec, entry.dst_spec)
    wrapped(*args, **kwargs)


def around_start_transfers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Remember whose loads these are.

    Wraps ``OffloadingConnectorWorker.start_kv_transfers(metadata)``.
    """
    metadata = argument(args, kwargs, 0, "metadata")
    for job_id, entry in metadata.load_jobs.items():
        instance.worker.note_request(job_id, entry.req_id)
    wrapped(*args, **kwargs)


def tell_page_size(worker: Any, blocks_per_page: int) -> None:
    """Let a worker name pages too; runs in the worker by RPC."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for part in connectors.parts(get_kv_transfer_group()):
        if hasattr(part, "connector_worker"):
            part.connector_worker.worker.blocks_per_page = blocks_per_page


def check_release(planner: Any, pages: list[int]) -> None:
    """Check by vLLM's own record that nothing still reads what is about to be unmapped.

    Args:
        planner: the ``OffloadingConnectorScheduler``; its record of jobs is not the
            fence's, so that a fault of the fence shows.
        pages: the ids of the pages to unmap.

    Raises:
        Violation: a store that has not ended names a block of one of them.
    """
    page_of = {
        block: page
        for page in pages
        for block in range(*planner.kvpatch_fence.blocks_of_page(page))
    }
    for job_id, job in planner._jobs.items():
        for block in (*(job.deferred_fence_block_ids or ()), *(job.fenced_block_ids or ())):
            if block in page_of:
                raise Violation(
                    "a page is unmapped under a transfer",
                    block,
                    page_of[block],
                    job_id,
                    job.req_id,
                )
