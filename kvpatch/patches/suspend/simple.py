"""Spilling into the CPU tier of SimpleCPUOffloadConnector, eager and lazy.

The connector holds a reference to every block that it copies, and stores a block under the hash
that it has on the device when the copy has completed.
"""

from __future__ import annotations

from typing import Any

from kvpatch import state
from kvpatch.patches.suspend.spill import Spill, Tier


class SimpleTier(Tier):
    """The CPU tier behind a ``SimpleCPUOffloadScheduler``."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._events: list[int] = []
        self._under_way: set[bytes] = set()

    def why_not(self) -> str:
        """Return why blocks cannot be stored in it: nothing is in the way."""
        return ""

    def _find(self, key: bytes) -> Any:
        return self.scheduler.cpu_block_pool.cached_block_hash_to_block.get_one_block(key)

    def holds(self, key: bytes) -> bool:
        """Whether a block is in it, and can be loaded."""
        return self._find(key) is not None

    def capacity(self) -> int:
        """Return the blocks that it has room for; its first one is never used."""
        return int(self.scheduler.cpu_block_pool.num_gpu_blocks) - 1

    def keep(self, keys: list[bytes]) -> None:
        """Let blocks be the last that it evicts: who is freed last goes last."""
        pool = self.scheduler.cpu_block_pool
        blocks = [self._find(key) for key in reversed(keys)]
        pool.touch(blocks)
        pool.free_blocks(blocks)

    def busy(self) -> bool:
        """Whether any store is under way, a spill's or the connector's own."""
        return stores(self.scheduler)

    def awaits(self, keys: set[bytes]) -> set[bytes]:
        """Return those of blocks whose store into it has not completed."""
        events = list(self.scheduler._store_event_to_blocks)
        if events != self._events:
            self._events, self._under_way = events, under_way(self.scheduler)
        return keys & self._under_way


def around_store_specs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Add the blocks of a spill to the store of a step.

    Wraps ``SimpleCPUOffloadScheduler.prepare_store_specs``, which returns device blocks, CPU
    blocks, requests, and the events' contents or None.
    """
    spill = state.find(instance, Spill)
    if spill is not None and spill.counts.away:
        spill.counts.loaded(loads(instance))
    if spill is not None and spill.alone and instance._lazy_mode:
        # Lazy mode would go on with what the spill has left out, in the place of what it stores.
        blocks, places, requests, events = [], [], [], None
    else:
        blocks, places, requests, events = wrapped(*args, **kwargs)
    if spill is None or not spill.waits:
        return blocks, places, requests, events
    more = store(instance, spill, set(blocks))
    return (
        [*blocks, *more],
        [*places, *more.values()],
        requests,
        None if events is None else [*events, *({} for _ in more)],
    )


def store(scheduler: Any, spill: Spill, now: set[int]) -> dict[int, int]:
    """Plan a store of a spill's next blocks that are not stored now; return their CPU blocks."""
    device, tier = scheduler._gpu_block_pool, scheduler.cpu_block_pool
    stored = under_way(scheduler) | {device.blocks[block].block_hash for block in now}
    wanted = [block for one in spill.next() for block in one.blocks]
    spill.planned((one.key for one in wanted if one.key in stored), ours=False)
    wanted = [one for one in wanted if one.key not in stored]
    # The tier evicts in the order in which the copies are let go of.
    wanted = wanted[: tier.get_num_free_blocks()][::-1]
    if not wanted:
        if spill.waits:
            spill.no_room(forever=not stores(scheduler) and not now)
        return {}
    ids = [one.block for one in wanted]
    places = [block.block_id for block in tier.get_new_blocks(len(ids))]
    device.touch([device.blocks[block] for block in ids])
    if not scheduler._lazy_mode:
        scheduler._in_flight_store_gpu_blocks.update(ids)
    spill.planned(one.key for one in wanted)
    return dict(zip(ids, places, strict=True))


def loads(scheduler: Any) -> list[bytes]:
    """Return the hashes of the blocks that this step begins to load."""
    blocks = scheduler.cpu_block_pool.blocks
    return [
        blocks[block].block_hash
        for load in scheduler._reqs_to_load.values()
        if load.load_event is None  # which vLLM sets after the stores were prepared
        for block in load.transfer_meta.cpu_block_ids
    ]


def stores(scheduler: Any) -> bool:
    """Whether a store is queued or in flight; vLLM has a method for it from 0.30 on."""
    return bool(
        getattr(scheduler, "_pending_finished_stores", ())
        or scheduler._store_event_to_blocks
        or scheduler._abandoned_store_event_to_blocks
    )


def under_way(scheduler: Any) -> set[bytes]:
    """Return the hashes of the blocks whose stores have not completed."""
    blocks = scheduler._gpu_block_pool.blocks
    return {
        blocks[block].block_hash
        for transfer in scheduler._store_event_to_blocks.values()
        for block in transfer.gpu_block_ids
    }
