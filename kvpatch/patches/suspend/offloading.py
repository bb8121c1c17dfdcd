"""Spilling into the CPU tier of OffloadingConnector.

The connector stores what belongs to a request. The blocks of a spill belong to none that is left,
so that each store of them has a request of its own here, which has finished: vLLM forgets it once
the store has completed on every worker, and waits for it before it gives a block of it away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from kvpatch import state
from kvpatch.patches.host_pool import presence
from kvpatch.patches.suspend.chunks import Chunks
from kvpatch.patches.suspend.spill import Chunk, Spill, Tier
from kvpatch.upstream.vllm_api import chunks_of

_NAME = "kvpatch-spill"


class OffloadingTier(Tier):
    """The CPU tier behind an ``OffloadingConnectorScheduler``, with or without tiers behind it."""

    def __init__(self, planner: Any) -> None:
        from vllm.v1.kv_offload.base import ReqContext

        self.planner = planner
        self.blocks_per_chunk = int(planner.config.blocks_per_chunk)
        self._context = ReqContext(req_id=_NAME)
        # What is behind the CPU tier is not asked: a lookup there promotes what it finds.
        self._manager = getattr(planner.manager, "primary_tier", planner.manager)

    def why_not(self) -> str:
        """Return why blocks cannot be stored in it."""
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        if not isinstance(self._manager, CPUOffloadingManager):
            return f"its CPU tier is a {type(self._manager).__name__}, which is not validated"
        groups = self.planner.config.kv_group_configs
        if any(group.hashes_per_chunk != self.blocks_per_chunk for group in groups):
            return "its blocks have several hashes each"
        return ""

    def holds(self, key: bytes) -> bool:
        """Whether a chunk is in it, and can be loaded."""
        return bool(self.held((key,)))

    def held(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of chunks that are in it, and can be loaded."""
        find = self._manager._policy.get  # a lookup counts, with store_threshold
        return [key for key in keys if (chunk := find(key)) is not None and chunk.is_ready]

    def capacity(self) -> int:
        """Return the chunks that it has room for."""
        pooled = self._pooled
        return chunks_of(self._manager, "_num_{}") if pooled is None else pooled.room

    def keep(self, keys: list[bytes]) -> None:
        """Let chunks be the last that it evicts."""
        self._manager.touch(keys, self._context)

    def hold(self, everything: bool) -> None:
        """Let other engines of a host pool take nothing of it, or again what is above its floor."""
        if self._pooled is not None:
            self._pooled.keeper.member.keep(everything)

    @property
    def grows(self) -> bool:
        """Whether a store that it does not take now waits for memory of a host pool."""
        return self._pooled is not None and self._pooled.keeper.grows

    @property
    def _pooled(self) -> Any:
        if not presence.wanted():
            return None
        from kvpatch.patches.host_pool.tier import Pooled  # without a pool nothing of it is there

        return state.find(self._manager, Pooled)

    def busy(self) -> bool:
        """Whether any transfer is under way, a spill's or the connector's own."""
        return bool(self.planner._jobs)

    def awaits(self, keys: set[bytes]) -> set[bytes]:
        """Return those of chunks whose store into it has not completed."""
        found = {key: self._manager._policy.get(key) for key in keys}
        return {key for key, chunk in found.items() if chunk is not None and not chunk.is_ready}


def note(planner: Any, chunks: Chunks, pool: Any) -> None:
    """Note the chunks of the requests that the connector knows, as far as they are hashed."""
    from vllm.v1.kv_offload.base import make_offload_key

    if chunks.full:
        chunks.forget(set(pool._block_id_to_key.values()))
        chunks.noted.clear()
    size, groups = chunks.size, planner.config.kv_group_configs
    for name, status in planner._req_status.items():
        hashes = getattr(status.req, "block_hashes", ())
        begin = chunks.noted.get(name, 0)
        for end in range(begin + size, len(hashes) + 1, size):
            for group in groups:
                chunks.add(
                    [make_offload_key(one, group.group_idx) for one in hashes[end - size : end]]
                )
            chunks.noted[name] = end
    for name in chunks.noted.keys() - planner._req_status.keys():
        del chunks.noted[name]


def around_store_jobs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> dict[int, Any]:
    """Add the blocks of a spill to the stores of a step, which the fence sees."""
    jobs: dict[int, Any] = wrapped(*args, **kwargs)
    spill = state.find(instance, Spill)
    if spill is not None and spill.counts.away:
        loads = instance._current_batch_load_jobs
        spill.counts.loaded(key for number in loads for key in instance._jobs[number].keys)
    if spill is not None and spill.chunks.size > 1:
        note(instance, spill.chunks, spill.pool)
    if spill is not None and spill.waits:
        jobs.update(store(instance, spill))
    return jobs


def store(planner: Any, spill: Spill) -> dict[int, Any]:
    """Plan a store of the next chunks of a spill; return it by its number, or nothing."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        RequestOffloadState,
        TransferJobStatus,
    )
    from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext, get_offload_group_idx

    manager, groups = planner.manager, [one.group_idx for one in planner.config.kv_group_configs]
    # A transfer has its blocks group by group.
    by_group: dict[int, list[Chunk]] = {group: [] for group in groups}
    found = spill.next()
    for one in found:
        by_group.get(get_offload_group_idx(one.key), []).append(one)
    blocks = {one.key: one.blocks for group in groups for one in by_group[group]}
    if not blocks:
        spill.drop(one.key for one in found)  # of a group that the connector does not store
        return {}
    number = planner._generate_job_id()
    context = ReqContext(req_id=f"{_NAME}-{number}")
    accepted = manager.on_new_request(context)
    keys, taken = accept(manager, list(blocks), context)
    manager.on_request_finished(context)
    if taken is None and getattr(spill.tier, "grows", False):
        return {}  # for two seconds at most, and then the tier evicts
    if taken is None:
        spill.no_room(forever=not (planner._jobs or manager.has_pending_work()))
        return {}
    spill.planned(taken.keys_to_store)
    spill.planned(keys, ours=False)  # the rest is there, or on its way
    if not taken.keys_to_store:
        return {}
    stored = [(key, one.block) for key in taken.keys_to_store for one in blocks[key]]
    ids = [block for _, block in stored]
    sizes = Counter(get_offload_group_idx(key) for key, _ in stored)
    request = SimpleNamespace(
        request_id=context.req_id, kv_transfer_params=None, block_hashes=[], is_finished=_yes
    )
    owner = RequestOffloadState(planner.config, request, context, accepted)
    owner.finished_signaled = True
    owner.transfer_jobs.add(number)
    planner._req_status[context.req_id] = owner
    planner._jobs[number] = TransferJobStatus(
        req_id=context.req_id,
        pending_count=planner.config.num_workers,
        keys=set(taken.keys_to_store),
        is_store=True,
        deferred_fence_block_ids=ids,
    )
    for block in ids:
        planner._block_id_to_pending_jobs.setdefault(block, set()).add(number)
    source = GPULoadStoreSpec(
        ids, group_sizes=[sizes[group] for group in groups], block_indices=[0] * len(groups)
    )
    return {number: TransferJob(context.req_id, source, taken.store_spec)}


def _yes() -> bool:
    return True


def accept(manager: Any, keys: list[bytes], context: Any) -> tuple[list[bytes], Any]:
    """Return the chunks that the tier has or takes in, and what it takes; None if it takes none.

    It takes all of a store or nothing: with some of its blocks in use, a smaller one fits. What
    ``store_threshold`` keeps out is taken in: the alternative is to lose it.
    """
    counter = getattr(manager, "primary_tier", manager)
    counts, counter.counts = counter.counts, None
    try:
        while keys:
            taken = manager.prepare_store(keys, context)
            if taken is not None:
                return keys, taken
            keys = keys[: len(keys) // 2]
        return [], None
    finally:
        counter.counts = counts
