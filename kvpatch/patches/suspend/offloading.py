"""Spilling into the CPU tier of OffloadingConnector.

The connector stores what belongs to a request. The blocks of a spill belong to none that is left,
so that each store of them has a request of its own here, which has finished: vLLM forgets it once
the store has completed on every worker, and waits for the store before it gives a block of it to
a request.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from kvpatch import state
from kvpatch.patches.suspend.spill import Cached, Spill, Tier

_NAME = "kvpatch-spill"


class OffloadingTier(Tier):
    """The CPU tier behind an ``OffloadingConnectorScheduler``."""

    def __init__(self, planner: Any) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        self.planner = planner
        self._hit, self._pending = LookupResult.HIT, LookupResult.HIT_PENDING
        self._context = ReqContext(req_id=_NAME)

    def why_not(self) -> str:
        """Return why blocks cannot be stored in it."""
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        if type(self.planner.manager) is not CPUOffloadingManager:
            return "it has secondary tiers, with which suspending is not validated"
        config = self.planner.config
        if config.blocks_per_chunk != 1 or any(
            group.hashes_per_chunk != 1 for group in config.kv_group_configs
        ):
            return "its CPU tier stores several blocks under one name (block_size)"
        return ""

    def holds(self, key: bytes) -> bool:
        """Whether a block is in it, and can be loaded."""
        return self.planner.manager.lookup(key, self._context) is self._hit

    def capacity(self) -> int:
        """Return the blocks that it has room for."""
        return int(self.planner.manager._num_chunks)

    def keep(self, keys: list[bytes]) -> None:
        """Let blocks be the last that it evicts."""
        self.planner.manager.touch(keys, self._context)

    def busy(self) -> bool:
        """Whether any transfer is under way, a spill's or the connector's own."""
        return bool(self.planner._jobs)

    def awaits(self, keys: set[bytes]) -> set[bytes]:
        """Return those of blocks whose store into it has not completed."""
        look = self.planner.manager.lookup
        return {key for key in keys if look(key, self._context) is self._pending}


def around_store_jobs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> dict[int, Any]:
    """Add the blocks of a spill to the stores of a step.

    Wraps ``OffloadingConnectorScheduler._build_store_jobs``, whose result the fence sees.
    """
    jobs: dict[int, Any] = wrapped(*args, **kwargs)
    spill = state.find(instance, Spill)
    if spill is not None and spill.counts.away:
        loads = instance._current_batch_load_jobs
        spill.counts.loaded(key for number in loads for key in instance._jobs[number].keys)
    if spill is not None and spill.waits:
        jobs.update(store(instance, spill))
    return jobs


def store(planner: Any, spill: Spill) -> dict[int, Any]:
    """Plan a store of the next blocks of a spill; return it by its number, or nothing."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        RequestOffloadState,
        TransferJobStatus,
    )
    from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext, get_offload_group_idx

    manager, groups = planner.manager, [one.group_idx for one in planner.config.kv_group_configs]
    # A transfer has its blocks group by group.
    by_group: dict[int, list[Cached]] = {group: [] for group in groups}
    for one in spill.next():
        by_group.get(get_offload_group_idx(one.key), []).append(one)
    blocks = {one.key: one.block for group in groups for one in by_group[group]}
    if not blocks:
        spill.cancel()  # what is left is of a group that the connector does not store
        return {}
    number = planner._generate_job_id()
    context = ReqContext(req_id=f"{_NAME}-{number}")
    accepted = manager.on_new_request(context)
    keys, taken = accept(manager, list(blocks), context)
    manager.on_request_finished(context)
    if taken is None:
        spill.no_room(forever=not planner._jobs)
        return {}
    spill.planned(taken.keys_to_store)
    spill.planned(keys, ours=False)  # the rest is there, or on its way
    if not taken.keys_to_store:
        return {}
    stored = [Cached(key, blocks[key]) for key in taken.keys_to_store]
    ids = [one.block for one in stored]
    sizes = Counter(get_offload_group_idx(one.key) for one in stored)
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
    """Return the blocks that the tier has or takes in, and what it takes; None if it takes none.

    A tier takes all of a store or nothing: with some of its blocks in use, a smaller one fits.

    What ``store_threshold`` keeps out because it was asked for too rarely is taken in: the
    alternative is to lose it.
    """
    counts, manager.counts = manager.counts, None
    try:
        while keys:
            taken = manager.prepare_store(keys, context)
            if taken is not None:
                return keys, taken
            keys = keys[: len(keys) // 2]
        return [], None
    finally:
        manager.counts = counts
