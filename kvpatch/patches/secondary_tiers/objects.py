"""vLLM's object store tier with checksums, a timeout and names of the blocks' layout.

vLLM takes an object of any bytes for the block of its name. Here a second object beside each, its
seal, has a checksum over the block and the name. It is written once the block is: a lookup asks
for seals, so that a block of a killed engine is not there. What fails the check is a miss, and its
block is computed again.

A seal proves no author: who may write to the bucket is trusted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.obj import manager
from vllm.v1.kv_offload.tiering.obj.manager import (
    NIXL_DEV_ID,
    NIXL_READ,
    NIXL_WRITE,
    ObjAsyncLookupManager,
    ObjectStoreSecondaryTierManager,
)

from kvpatch import state
from kvpatch.logs import log
from kvpatch.patches.secondary_tiers import fingerprint
from kvpatch.patches.secondary_tiers.block_files import FIELDS, seal
from kvpatch.patches.secondary_tiers.timeout import Unanswered, patience
from kvpatch.patches.secondary_tiers.weights import Weights
from kvpatch.telemetry.disk import Disk
from kvpatch.upstream.vllm_api import lookup_results

SEALED = 64  # bytes of a seal
SUFFIX = ".seal"
_PROBE = "probe"
_MISS, _ = lookup_results()


@contextmanager
def _telemetry() -> Iterator[None]:
    """Let NIXL keep the times that vLLM reads: up to 0.32 it does not ask for them, and ends."""
    original = manager.nixl_agent_config
    manager.nixl_agent_config = lambda **options: original(**options | {"capture_telemetry": True})
    try:
        yield
    finally:
        manager.nixl_agent_config = original


class SealLookups(ObjAsyncLookupManager):  # type: ignore[misc]
    """vLLM's lookups, of seals, with the time of those that are pending."""

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        """Return which blocks have a seal; runs on the tier's own thread."""
        tier = self._tier
        tier.unanswered.asked(_PROBE)
        try:
            asked = [(0, 1, 0, name) for name in tier.names(keys, SUFFIX)]
            found = tier._agent.query_memory(asked, "OBJ", "OBJ")
            return [one is not None for one in found]
        except Exception:  # vLLM logs it, and takes them for misses
            tier.disk.failed("lookup")
            raise
        finally:
            tier.unanswered.answered(_PROBE)


@dataclass
class Job:
    """A job that has begun."""

    keys: list[Any]
    chunks: Any  # their places in the primary tier
    loads: bool
    moving: set[str] = field(default_factory=set)  # of "blocks" and "seals", what NIXL moves now
    failed: bool = False  # one of these could not be moved, or not be submitted
    # On a store the bytes being computed; on a load which blocks are what was stored.
    seals: Future[list[Any]] | None = None


class SealedObjectTier(ObjectStoreSecondaryTierManager):  # type: ignore[misc]
    """vLLM's ``obj`` tier with seals; while it is late, it is not used.

    A store computes seals on a thread, then writes the blocks, then the seals. A load reads both
    at once, then checks on the thread. NIXL is called where vLLM calls it.
    """

    _lookup_manager: Any
    _pending_results: list[Any]
    _dram_prepped_handle: Any
    _block_size_bytes: int

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **config: Any
    ) -> None:
        self._jobs: dict[int, Job] = {}
        with fingerprint.without_folders(), _telemetry():
            super().__init__(offloading_spec, primary_kv_view, tier_type, **config)
        self.unanswered = Unanswered(patience())
        self.disk = Disk()  # what it did with its store
        # Whether the blocks of the engine are those of the tier's names.
        self.weights = state.find(self._file_mapper, Weights)
        self._memory = primary_kv_view.cast("B")
        self._threads = ThreadPoolExecutor(1, "kvpatch-seals")
        # A chunk is in one transfer at a time, and so is its seal.
        self._seals = np.zeros((len(primary_kv_view), SEALED), dtype=np.uint8)
        first = self._seals.ctypes.data
        self._seals_registered = self._agent.register_memory(
            [(first, self._seals.nbytes, NIXL_DEV_ID, "")], "DRAM"
        )
        self._seals_prepared = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT",
            [(first + at * SEALED, SEALED, NIXL_DEV_ID) for at in range(len(self._seals))],
            "DRAM",
        )
        self._lookup_manager.shutdown()
        self._lookup_manager = SealLookups(tier=self, tier_type=tier_type)

    @property
    def late(self) -> bool:
        """Whether the store has not responded within the timeout."""
        return self.unanswered.late

    @property
    def _passed_over(self) -> bool:
        return self.late or (self.weights is not None and not self.weights.usable())

    def names(self, keys: Iterable[Any], suffix: str = "") -> Iterator[str]:
        """Iterate over the names of blocks' objects, or with ``SUFFIX`` over their seals'."""
        return (self._file_mapper.get_file_name(key) + suffix for key in keys)

    def lookup(self, key: Any, req_context: Any) -> Any:
        """Look up whether a block has a seal; a miss if the tier is not used."""
        return _MISS if self._passed_over else super().lookup(key, req_context)

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store blocks; fail if the tier is not used, so that none is pinned."""
        job = self._begin(job_metadata, loads=False)
        if job is not None:
            if self.events is not None:
                self._store_job_keys[job_metadata.job_id] = job.keys
            job.seals = self._threads.submit(self._computed, job)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load blocks; fail if the tier is not used."""
        job = self._begin(job_metadata, loads=True)
        if job is not None:
            self._load_job_keys[job_metadata.job_id] = job.keys
            self._move(job_metadata.job_id, job, "blocks", NIXL_READ)
            if not job.failed:
                self._move(job_metadata.job_id, job, "seals", NIXL_READ)

    def _begin(self, metadata: Any, loads: bool) -> Job | None:
        if self._passed_over:
            if self.late:  # and not passed over for its weights, which is no fault
                self.disk.failed("late")
            self._pending_results.append(JobResult(metadata.job_id, success=False))
            return None
        job = self._jobs[metadata.job_id] = Job(list(metadata.keys), metadata.chunk_ids, loads)
        self.unanswered.asked(metadata.job_id)
        return job

    def _move(self, number: int, job: Job, what: str, way: str) -> None:
        """Let NIXL move a job's blocks or its seals; end the job if nothing of it is moved.

        Of seals the number is ``-1 - number`` to vLLM, which has no such job.
        """
        ended, self._pending_results = self._pending_results, []
        try:
            with self._of_seals() if what == "seals" else nullcontext():
                suffix, named = (SUFFIX, -1 - number) if what == "seals" else ("", number)
                self._submit_transfer(named, job.chunks, self.names(job.keys, suffix), way)
            refused = bool(self._pending_results)  # vLLM has logged it
        except Exception as error:  # what NIXL itself raises
            log.warning("NIXL does not move the %s of job %d: %s", what, number, error)
            refused = True
        self._pending_results = ended
        if not refused:
            job.moving.add(what)
            return
        job.failed = True
        if not job.moving:
            self._end(number, job, ())

    @contextmanager
    def _of_seals(self) -> Iterator[None]:
        blocks = self._dram_prepped_handle, self._block_size_bytes
        self._dram_prepped_handle, self._block_size_bytes = self._seals_prepared, SEALED
        try:
            yield
        finally:
            self._dram_prepped_handle, self._block_size_bytes = blocks

    def _block(self, chunk: int) -> memoryview:
        size = self._block_size_bytes_of_chunks
        return self._memory[chunk * size : (chunk + 1) * size]

    @property
    def _block_size_bytes_of_chunks(self) -> int:
        return len(self._memory) // len(self._seals)

    def _computed(self, job: Job) -> list[bytes]:
        found = []
        for name, chunk in zip(self.names(job.keys), job.chunks.tolist(), strict=True):
            with self._block(chunk) as block:
                found.append(seal(name, block))
        return found

    def _poll_active_transfers(self) -> None:
        """Let jobs go on as NIXL and the thread have come to an end of something."""
        super()._poll_active_transfers()
        ended, self._pending_results = self._pending_results, []
        for result in ended:
            number = result.job_id if result.job_id >= 0 else -1 - result.job_id
            job = self._jobs.get(number)
            if job is None:  # declined
                self._pending_results.append(result)
                continue
            job.moving.discard("blocks" if result.job_id >= 0 else "seals")
            job.failed = job.failed or not result.success
            if result.success:  # a store with many transfers responds
                for other in self._jobs:
                    self.unanswered.asked(other)
            if not job.moving:
                self._moved(number, job, result)
        for number, job in list(self._jobs.items()):
            if job.seals is not None and job.seals.done():
                self._sealed(number, job)

    def _moved(self, number: int, job: Job, result: Any) -> None:
        """Go on after NIXL has moved all that it was asked to move for a job."""
        if job.failed:
            self._end(number, job, ())
        elif job.loads:
            job.seals = self._threads.submit(self._verified, job)
        elif result.job_id >= 0:
            self._move(number, job, "seals", NIXL_WRITE)
        else:
            self._end(number, job, job.keys)

    def _sealed(self, number: int, job: Job) -> None:
        """Go on with the seals that the thread has computed, or what it has found."""
        assert job.seals is not None
        future, job.seals = job.seals, None
        if future.exception() is not None:
            log.warning("the seals of a secondary tier's blocks: %s", future.exception())
            job.failed = True
            self._end(number, job, ())
            return
        found = future.result()
        if job.loads:
            self._end(number, job, [key for key, same in zip(job.keys, found, strict=True) if same])
            return
        for chunk, one in zip(job.chunks.tolist(), found, strict=True):
            self._seals[chunk, : FIELDS.size] = np.frombuffer(one, dtype=np.uint8)
        self._move(number, job, "blocks", NIXL_WRITE)

    def _verified(self, job: Job) -> list[bool]:
        computed = self._computed(job)
        read = (self._seals[chunk, : FIELDS.size].tobytes() for chunk in job.chunks.tolist())
        return [one == other for one, other in zip(computed, read, strict=True)]

    def _end(self, number: int, job: Job, moved: Collection[Any]) -> None:
        del self._jobs[number]
        self.unanswered.answered(number)
        whole = len(moved) == len(job.keys)
        if not whole:
            what = "load" if job.loads else "store"
            self.disk.failed(what if job.failed else "damaged")
        size = len(moved) * self._block_size_bytes_of_chunks
        self.disk.moved("loaded" if job.loads else "stored", size)
        self._pending_results.append(
            JobResult(number, success=whole, successful_keys=None if whole else list(moved))
        )

    def drain_jobs(self) -> None:
        """Wait until every job has ended, one way or the other; NIXL gives up by itself."""
        while self._jobs:
            self._poll_active_transfers()
            time.sleep(0.001)

    def shutdown(self) -> None:
        """End the thread and release what NIXL has, as vLLM does."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        super().shutdown()
        self._agent.release_dlist_handle(self._seals_prepared)
        self._agent.deregister_memory(self._seals_registered)
