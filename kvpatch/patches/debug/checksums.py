"""OffloadingConnector in debug mode: stored blocks are checksummed, loaded blocks verified.

The checksum of a block is taken when its store is handed to the worker, and again when the copy is
launched and when the block was loaded: every block is read twice more.

A secondary tier writes to the CPU tier too. The scheduler tells the workers with each step to which
chunks; their loads are counted as unverified, and the tier's own files have checksums.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from kvpatch import state
from kvpatch.environ import VERIFY
from kvpatch.patch import argument
from kvpatch.patches.debug.audit import Audited, Region, checksum
from kvpatch.upstream.vllm_api import Place, blocks_per_chunk, places


class AuditedWorker(Audited):
    """An ``OffloadingWorker`` whose copies are verified.

    Args:
        groups: the regions of each group's blocks.
        chunk: device blocks in one chunk of the CPU tier.
        stores: whether this worker stores; of ranks with equal KV only one does.
    """

    def __init__(
        self, worker: Any, groups: list[list[Region]], chunk: int, stores: bool = True
    ) -> None:
        super().__init__(worker)
        self._groups = groups
        self._chunk = chunk
        self._stores = stores
        self._handed: dict[int, dict[Place, int]] = {}
        self._stored: dict[int, dict[Place, int]] = {}  # by chunk
        self._promoted: set[int] = set()
        self._loading: dict[int, list[tuple[int, Place, int | None]]] = {}
        self._requests: dict[int, str] = {}

    def request_of(self, job_id: int) -> str:
        """Return whose transfer a job is."""
        return self._requests.get(job_id, "unknown")

    def note_request(self, job_id: int, request: str) -> None:
        """Remember whose transfer a job is."""
        self._requests[job_id] = request

    def read_names(self, metadata: Any) -> None:
        """Read the names of a step's transfers: here nothing needs them."""

    def forget(self, chunks: Collection[int]) -> None:
        """Forget what was stored in chunks that a secondary tier writes to."""
        for chunk in chunks:
            self._stored.pop(chunk, None)
        self._promoted.update(chunks)

    def hand_off(self, job_id: int, device: Any, tier: Any) -> None:
        """Take the checksums of a store that is planned and not launched yet."""
        if self._stores:
            pairs = places(device, tier, self._chunk)
            self._handed[job_id] = {
                place: checksum(self._groups[place.group], block) for block, place in pairs
            }

    def check_store(self, job_id: int, device: Any, tier: Any) -> None:
        """Check that the blocks of a store launched now are what they were, or raise Violation."""
        if job_id not in self._handed:  # flushed in the step that planned it
            self.hand_off(job_id, device, tier)
        sums = self._handed.pop(job_id)
        for block, place in places(device, tier, self._chunk):
            if checksum(self._groups[place.group], block) != sums[place]:
                raise self.violation(
                    "a block changed before its store was launched",
                    block,
                    job_id,
                    self.request_of(job_id),
                )
            self.count("stored")
        # A job stores whole chunks: nothing of what was there before can be loaded any more.
        self._stored |= {place.chunk: {} for place in sums}
        for place, one in sums.items():
            self._stored[place.chunk][place] = one
        self._promoted -= {place.chunk for place in sums}

    def expect_load(self, job_id: int, device: Any, tier: Any) -> None:
        """Remember what a load that is launched now must bring."""
        expected = self._loading[job_id] = []
        for block, place in places(device, tier, self._chunk):
            stored = self._stored.get(place.chunk, {}).get(place)
            if stored is None and (place.chunk in self._promoted or not self._stores):
                self.count("unverified")
            else:
                expected.append((block, place, stored))

    def end_load(self, job_id: int) -> None:
        """Verify what a load has brought, if the job is one, or raise Violation."""
        for block, place, stored in self._loading.pop(job_id, ()):
            request = self.request_of(job_id)
            self.check_loaded(self._groups[place.group], block, stored, job_id, request)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Check the blocks, and launch the copy."""
        self.check_store(job_id, src_spec, dst_spec)
        return bool(self._audited.submit_store(job_id, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **more: Any) -> bool:
        """Launch a load; its blocks are verified when it has ended."""
        self.expect_load(job_id, dst_spec, src_spec)
        return bool(self._audited.submit_load(job_id, src_spec, dst_spec, **more))

    def wait(self, job_ids: set[int]) -> None:
        """Wait for jobs; a load that is waited for is computed on in the same step."""
        self._audited.wait(job_ids)
        for job_id in job_ids:
            self.end_load(job_id)

    def get_finished(self) -> Any:
        """Return the transfers that ended; a load must have brought what was stored."""
        finished = self._audited.get_finished()
        for result in finished:
            self.end_load(result.job_id)
            self._requests.pop(result.job_id, None)
        return finished


def _names() -> Any:
    """Return the module that ``kvpatch verify`` alone needs."""
    return import_module("kvpatch.patches.debug.names")


def regions_of(kv_caches: Any) -> list[list[Region]]:
    """Return the regions of each group in vLLM's ``CanonicalKVCaches``."""
    return [
        [(kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in group]
        for group in kv_caches.group_data_refs
    ]


def around_init_worker(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Put the audit around the worker of the offloading spec."""
    wrapped(*args, **kwargs)
    kind = _names().NamedWorker if VERIFY.read() else AuditedWorker
    instance.worker = kind(
        instance.worker,
        regions_of(argument(args, kwargs, 0, "kv_caches")),
        blocks_per_chunk(instance.spec),
        getattr(instance, "_is_store_writer", True),  # up to 0.26 every rank stores
    )


def around_prepare_store(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Take the checksums of new stores; their compute has been launched by now."""
    metadata = argument(args, kwargs, 0, "metadata")
    instance.worker.read_names(metadata)
    for job_id, entry in metadata.store_jobs.items():
        instance.worker.note_request(job_id, entry.req_id)
        instance.worker.hand_off(job_id, entry.src_spec, entry.dst_spec)
    wrapped(*args, **kwargs)


def around_start_transfers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Remember whose loads these are, and forget what secondary tiers write over."""
    metadata = argument(args, kwargs, 0, "metadata")
    instance.worker.read_names(metadata)
    promoted = state.find(metadata, PromotedChunks)
    if promoted is not None:
        instance.worker.forget(promoted.chunks)
    for job_id, entry in metadata.load_jobs.items():
        instance.worker.note_request(job_id, entry.req_id)
    wrapped(*args, **kwargs)


@dataclass
class PromotedChunks:
    """Chunks that secondary tiers write to; on the manager until a step's metadata takes them."""

    chunks: list[int] = field(default_factory=list)


def around_promotions(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Note the chunks that secondary tiers begin to write to.

    A transfer of what was there has ended: all workers had reported it before they were given away.
    """
    chunks = state.of(instance, PromotedChunks).chunks
    for by_request in instance._pending_load_submissions.values():
        for entry in by_request.values():
            # Up to 0.29 the chunks are called blocks.
            chunks.extend(map(int, getattr(entry, "chunk_ids", None) or entry.block_ids))
    return wrapped(*args, **kwargs)


def around_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Tell the workers with a step which chunks secondary tiers write to."""
    if VERIFY.read():
        _names().follow(instance.manager)
    meta = wrapped(*args, **kwargs)
    if VERIFY.read():
        _names().take(instance.manager, meta)
    promoted = state.find(instance.manager, PromotedChunks)
    if promoted is not None and promoted.chunks:
        state.attach(meta, PromotedChunks(promoted.chunks))
        promoted.chunks = []
    return meta
