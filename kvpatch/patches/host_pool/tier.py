"""The scheduler's side: vLLM's manager of the CPU tier hands out chunks of committed extents.

Its policy decides what is evicted, as without a pool. What is a chunk here is called a block up
to vLLM 0.29; the wrappers do for both.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.pool.extents import Extents
from kvpatch.pool.keeper import Keeper
from kvpatch.upstream.vllm_api import lookup_results


class Pooled:
    """A tier in the pool; kept on the engine, its scheduler, the connector's and the manager.

    Its lock is of the extents, and of what a step of the scheduler has found in the tier.
    """

    def __init__(
        self,
        extents: Extents,
        keeper: Keeper,
        lock: threading.RLock,
        workers: int,
        disks: tuple[Any, ...] = (),
    ) -> None:
        self.extents, self.keeper, self.lock, self.workers = extents, keeper, lock, workers
        self.disks = disks  # secondary tiers, whose threads read and write the tier's chunks
        self.looking = False  # a block is looked up, and would be promoted
        self.promotions = 0  # blocks of this step that wait for memory to be promoted into
        self._process: int | None = os.getpid()

    def evict_draining(self) -> None:
        """Evict what can be evicted in extents that have to go, under the lock."""
        for index in self.extents.draining():
            self.keeper.evict(index)

    @property
    def room(self) -> int:
        """The chunks that the engine can have, if the others give all that they may."""
        view = self.keeper.view
        if view is None:
            return self.extents.chunks
        free = view.limit - view.total + sum(peer.owner.lends for peer in view.peers)
        return max(0, min(self.extents.chunks, (view.own + free) // self.extents.chunk_bytes))

    def close(self) -> None:
        """Give everything back; once, and not in a forked worker."""
        if self._process == os.getpid():
            self._process = None
            at_work = [disk for disk in self.disks if not _has_ended(disk)]
            self.keeper.close(in_use=bool(at_work))


def _has_ended(disk: Any) -> bool:
    """Return whether no thread of a disk touches the tier any more; end them if nobody has.

    One that hangs in a call goes on when that returns: from memory that was given back meanwhile
    it would write zeros, with a checksum that is right for them.
    """
    if not disk._pool._stop:
        disk.shutdown()
    return not any(thread.is_alive() for thread in disk._pool._threads)


def evict(manager: Any, extents: Extents, index: int) -> int:
    """Evict the blocks of an extent that no transfer uses; return how many."""
    gone = []
    for key in list(extents.open[index].held.values()):
        chunk = manager._policy.get(key)
        if chunk is not None and chunk.ref_cnt == 0:
            manager._policy.remove(key)
            _change(manager, "_num_evictable_cache_{}", -1)
            _take_back(manager, extents, chunk)
            gone.append(key)
    if gone and manager.events is not None:
        from vllm.v1.kv_offload.base import OffloadingEvent

        manager.events.append(OffloadingEvent(keys=gone, medium=manager.medium, removed=True))
    return len(gone)


# The manager of the tier


def around_free_count(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> int:
    """Return the free chunks of committed extents. Wraps ``_get_num_free_chunks``."""
    pooled = state.find(instance, Pooled)
    return wrapped(*args, **kwargs) if pooled is None else pooled.extents.free


def around_allocate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> list[Any]:
    """Hand out chunks of the lowest extents. Wraps ``_allocate_chunks(keys)``."""
    pooled = state.find(instance, Pooled)
    if pooled is None:
        return list(wrapped(*args, **kwargs))
    keys = argument(args, kwargs, 0, "keys")
    status = _status()
    taken = [status(chunk) for chunk in pooled.extents.allocate(keys)]
    _change(instance, "_num_allocated_{}", len(taken))
    return taken


def around_free(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Take a chunk back. Wraps ``_free_chunk(chunk)``."""
    pooled = state.find(instance, Pooled)
    if pooled is None:
        wrapped(*args, **kwargs)
        return
    _take_back(instance, pooled.extents, args[0] if args else next(iter(kwargs.values())))


def around_prepare_store(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let a store wait while the tier can grow: vLLM asks again in its request's next step."""
    pooled = state.find(instance, Pooled)
    if pooled is None:
        return wrapped(*args, **kwargs)
    keys = list(argument(args, kwargs, 0, "keys"))
    with pooled.lock:
        # The policy would take them for what it may evict, and their chunks are not handed out.
        pooled.evict_draining()
        chunks = [(key, instance._policy.get(key)) for key in keys]
        pooled.extents.use(_id(chunk) for _, chunk in chunks if chunk is not None)
        missing = sum(chunk is None and _is_due(instance, key) for key, chunk in chunks)
        if missing and pooled.keeper.need(missing + pooled.promotions):
            pooled.promotions += missing * pooled.looking
            return None
        if "keys" in kwargs:
            return wrapped(*args, **{**kwargs, "keys": keys})
        return wrapped(keys, *args[1:], **kwargs)


def around_lookup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let a request wait for memory to promote its blocks into, where vLLM calls it a miss."""
    pooled = state.find(instance, Pooled)
    if pooled is None:
        return wrapped(*args, **kwargs)
    miss, (later, _) = lookup_results()
    with pooled.lock:
        before, pooled.looking = pooled.promotions, True
        try:
            result = wrapped(*args, **kwargs)
        finally:
            pooled.looking = False
        return later if result is miss and pooled.promotions > before else result


def around_prepare_load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Note what is found. Wraps ``prepare_load``, whose result names the chunks."""
    pooled = state.find(instance, Pooled)
    if pooled is None:
        return wrapped(*args, **kwargs)
    with pooled.lock:
        found = wrapped(*args, **kwargs)
        pooled.extents.use(found.block_ids)
        pooled.extents.reuse.found(len(found.block_ids))
        return found


def around_touch(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Note what is used. Wraps ``touch(keys, req_context)``."""
    pooled = state.find(instance, Pooled)
    if pooled is None:
        wrapped(*args, **kwargs)
        return
    with pooled.lock:
        chunks = map(instance._policy.get, argument(args, kwargs, 0, "keys"))
        pooled.extents.use(_id(chunk) for chunk in chunks if chunk is not None)
        wrapped(*args, **kwargs)


def around_completion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Have the keeper evict what no transfer uses any more in an extent that has to go.

    Not here: secondary tiers read what was stored as soon as that has completed.
    """
    pooled = state.find(instance, Pooled)
    if pooled is None:
        wrapped(*args, **kwargs)
        return
    with pooled.lock:
        wrapped(*args, **kwargs)
        if pooled.extents.draining():
            pooled.keeper.wake()


def around_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Take back every chunk. Wraps ``reset_cache``."""
    pooled = state.find(instance, Pooled)
    if pooled is None:
        wrapped(*args, **kwargs)
        return
    with pooled.lock:
        wrapped(*args, **kwargs)
        pooled.keeper.reset()


def around_events(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Take the events at once, none of which is added meanwhile. Wraps ``take_events``."""
    pooled = state.find(instance, Pooled)
    if pooled is None:
        return wrapped(*args, **kwargs)
    with pooled.lock:
        return list(wrapped(*args, **kwargs))


# The schedulers


def around_schedule(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Keep what a step has found in the tier until it is being loaded."""
    pooled = state.find(instance, Pooled)
    if pooled is None:
        return wrapped(*args, **kwargs)
    with pooled.lock:
        pooled.promotions = 0
        pooled.keeper.evicts = False
        return wrapped(*args, **kwargs)


def around_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Note the transfers of a step."""
    meta = wrapped(*args, **kwargs)
    pooled = state.find(instance, Pooled)
    if pooled is not None:
        with pooled.lock:
            for batch, side in ((meta.store_jobs, "dst_spec"), (meta.load_jobs, "src_spec")):
                for job, transfer in batch.items():
                    chunks = getattr(transfer, side).block_ids
                    pooled.extents.begin(job, chunks, pooled.workers)
    return meta


def around_worker_output(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Note the transfers that have ended."""
    pooled = state.find(instance, Pooled)
    if pooled is None:
        return wrapped(*args, **kwargs)
    meta = argument(args, kwargs, 0, "connector_output").kv_connector_worker_meta
    with pooled.lock:
        result = wrapped(*args, **kwargs)
        for job, workers in meta.completed_jobs.items() if meta is not None else ():
            pooled.extents.report(job, workers)
    return result


def around_pending_work(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep the engine stepping until every transfer has ended, also after a reset."""
    pooled = state.find(instance, Pooled)
    pending = bool(wrapped(*args, **kwargs))
    return pending or (pooled is not None and pooled.extents.transferring)


def _take_back(manager: Any, extents: Extents, chunk: Any) -> None:
    extents.release(_id(chunk))
    _change(manager, "_num_allocated_{}", -1)


def _is_due(manager: Any, key: Any) -> bool:
    """Return whether a block may pass the reuse threshold, which counts this offer or lookup."""
    counts = manager.counts
    return counts is None or counts.get(key, 0) + 1 >= manager.store_threshold


def _id(chunk: Any) -> int:
    return int(chunk.chunk_id if hasattr(chunk, "chunk_id") else chunk.block_id)


def _change(manager: Any, name: str, by: int) -> None:
    later = name.format("chunks")
    known = later if hasattr(manager, later) else name.format("blocks")
    setattr(manager, known, getattr(manager, known) + by)


def _status() -> Any:
    from vllm.v1.kv_offload.cpu.policies import base

    return getattr(base, "ChunkStatus", None) or base.BlockStatus
