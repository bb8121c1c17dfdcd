"""Debug mode before vLLM 0.28, in the terms of later releases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpatch.patch import argument
from kvpatch.patches.debug.audit import Region
from kvpatch.patches.debug.checksums import AuditedWorker, regions_of
from kvpatch.patches.debug.unmapping import Named, watch
from kvpatch.upstream.vllm_api import blocks_per_chunk, by_group


class AuditedHandlers(AuditedWorker):
    """The audit of an ``OffloadingConnectorWorker``'s worker of 0.21 to 0.24, with handlers."""

    def __init__(self, worker: Any, groups: list[list[Region]]) -> None:
        super().__init__(worker.worker, groups, blocks_per_chunk(worker.spec))
        self._connector_worker = worker

    def hand_off(self, job_id: int, device: Any, tier: Any) -> None:
        """Take the checksums of a store that is planned and not launched yet."""
        super().hand_off(job_id, by_group(device, self._chunk), tier)

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        """Launch a transfer from the first to the second of ``spec``."""
        source, destination = spec
        if source.medium() == "GPU":
            self.check_store(job_id, by_group(source, self._chunk), destination)
        else:
            self.expect_load(job_id, by_group(destination, self._chunk), source)
        return bool(self._audited.transfer_async(job_id, spec))


class AuditedByRequest(AuditedHandlers):
    """The same up to 0.20, where the worker knows whose a job is."""

    def request_of(self, job_id: int) -> str:
        """Return whose transfer a job is; asked before the worker forgets the job."""
        request, _ = self._connector_worker._jobs[job_id]
        return str(request)


def around_register_handlers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Put the audit around the worker of 0.21 to 0.24."""
    wrapped(*args, **kwargs)
    instance.worker = AuditedHandlers(instance, regions_of(argument(args, kwargs, 0, "kv_caches")))


def around_register_by_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Put the audit around the worker of 0.19 and 0.20."""
    wrapped(*args, **kwargs)
    instance.worker = AuditedByRequest(instance, regions_of(argument(args, kwargs, 0, "kv_caches")))


def around_register_tensors(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Put the audit around the worker of 0.16 to 0.18, to which kvpatch passes regions."""
    wrapped(*args, **kwargs)
    kv_caches = argument(args, kwargs, 0, "kv_caches")
    regions = [rows.view(len(rows), -1) for rows in kv_caches.values()]
    instance.worker = AuditedByRequest(instance, [[(rows, rows.shape[1]) for rows in regions]])


def around_prepare_store(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Take the checksums of new stores of 0.21 to 0.24."""
    metadata = argument(args, kwargs, 0, "metadata")
    for job_id, entry in metadata.store_jobs.items():
        instance.worker.note_request(job_id, entry.req_id)
        instance.worker.hand_off(job_id, *entry.transfer_spec)
    wrapped(*args, **kwargs)


def around_prepare_store_by_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Take the checksums of new stores of 0.16 to 0.20, whose jobs are made here."""
    begun = len(instance._unsubmitted_store_jobs)
    wrapped(*args, **kwargs)
    for job_id, pair in instance._unsubmitted_store_jobs[begun:]:
        instance.worker.hand_off(job_id, *pair)


def stores(scheduler: Any, planner: Any) -> Iterator[Named]:
    """Iterate over the blocks of stores that have not ended, of 0.21 to 0.27."""
    for job_id, job in planner._jobs.items():
        for block in (
            *(job.non_sliding_window_block_ids or ()),
            *(job.sliding_window_block_ids or ()),
        ):
            yield block, job_id, job.req_id


def held(scheduler: Any, planner: Any) -> Iterator[Named]:
    """Iterate over the blocks of requests that are stored or loaded, of 0.16 to 0.20.

    A preempted one is off the record, because the workers wait for its stores.
    """
    for on_record in (planner._reqs_being_stored, planner._reqs_being_loaded):
        for request, keys in on_record.items():
            for group in scheduler.kv_cache_manager.get_block_ids(request) if keys else ():
                for block in group:
                    yield block, "unknown", request


def around_install(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Check every unmapping that the fence of 0.21 to 0.27 lets through."""
    wrapped(*args, **kwargs)
    watch(instance, stores)


def around_install_by_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Check every unmapping that the fence of 0.16 to 0.20 lets through."""
    wrapped(*args, **kwargs)
    watch(instance, held)
