"""Lazy mode: kvcached's blocks in eviction order.

In lazy mode the connector stores a block only when it is about to be evicted. In each step
it walks vLLM's free block queue for this, up to a target of what two steps can allocate.
kvcached has no such queue:

- Free memory has no block ids. An allocation takes free memory first, and then evicts
  cached blocks in LRU order.
- The position where a walk stopped is invalid in the next step: kvcached may have evicted
  that block, unmapped it, or moved it to the end. So every walk starts at the head, and a
  block is offered once each time it becomes evictable.
- A block whose copy has completed would move to the end, as if it had been used, and the
  blocks behind it, which have no copy, would be evicted first. It returns to the head.
- Above its cap on cached tokens kvcached evicts in the same call that frees a block,
  before any walk can offer it. Here the blocks above the cap are offered first, and evicted
  in the step after they were stored in the CPU tier.
- A burst of prompts allocates more than the target, especially if they are loaded from
  the CPU tier, because loads do not count as tokens of a step. A new prompt that would
  evict a block without a copy waits for the steps that the copy takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any, NamedTuple

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.patches.elastic_memory.eviction import victims
from kvpatch.patches.elastic_memory.verify import not_elastic


class EvictableBlocks(OrderedDict[int, Any]):
    """The pool's evictable blocks in LRU order, with the state of lazy mode.

    Replaces ``_evictable_blocks`` in kvcached's pool, which removes a block whenever it is
    used or evicted, even if it is not in there.
    """

    def __init__(self, blocks: dict[int, Any]) -> None:
        self.offered: set[int] = set()  # blocks that a walk has offered since they became evictable
        self.used: set[int] = set()  # blocks that were used again while they were not evictable
        super().__init__(blocks)

    def __setitem__(self, block_id: int, block: Any) -> None:
        self.used.discard(block_id)
        super().__setitem__(block_id, block)

    def pop(self, block_id: int, *default: Any) -> Any:
        """Remove a block that is in use or evicted from now on."""
        self.offered.discard(block_id)
        if block_id not in self:
            self.used.add(block_id)
        return super().pop(block_id, *default)

    def clear(self) -> None:
        """Remove all blocks."""
        self.offered.clear()
        super().clear()


class FreeMemory:
    """Represents one block of memory that is free or has nothing left to store."""

    ref_cnt: int = 0
    block_hash: None = None
    is_null: bool = False


class EvictionOrder:
    """The part of vLLM's ``FreeKVCacheBlockQueue`` that lazy mode uses, for a kvcached pool.

    Args:
        scheduler: the connector's ``SimpleCPUOffloadScheduler``.
        pool: kvcached's ``ElasticBlockPool``.
    """

    def __init__(self, scheduler: Any, pool: Any) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._nothing = FreeMemory()
        self._trim_next: list[Any] = []
        self._target = scheduler._target_free
        self.full = False  # a prompt waits in this step, and so do all later ones
        self._block_sizes = [
            # Up to 0.22 the connector does not support context parallelism.
            group.kv_cache_spec.block_size * getattr(scheduler, "cp_world_size", 1)
            for group in scheduler.cpu_kv_cache_config.kv_cache_groups
        ]
        self.evictable = EvictableBlocks(pool._evictable_blocks)
        pool._evictable_blocks = self.evictable

    @property
    def above_cap(self) -> int:
        """The number of cached blocks above kvcached's cap, still to be stored or evicted."""
        cap = self._pool.max_cached_blocks
        return 0 if cap < 0 else max(0, len(self.evictable) - cap)

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Iterate in eviction order, from the head.

        Free blocks, and blocks that were offered or are being stored already, are yielded as
        ``FreeMemory``, which counts toward the connector's target and is never stored.
        """
        known = set(self._being_stored())
        # These return to the head.
        yield from repeat(self._nothing, len(known))
        for block in self._trim_next:
            yield from self._offer(block, known)
        yield from repeat(self._nothing, self._pool.kv_cache_manager.available_size())
        for block_id, block in self.evictable.items():
            if block_id in self.evictable.offered:
                yield self._nothing
            else:
                yield from self._offer(block, known)

    def _offer(self, block: Any, known: set[Any]) -> Iterator[Any]:
        yield self._nothing if block.block_hash in known else block
        # Only if the connector continues: it may have stopped at this block.
        known.add(block.block_hash)
        self.evictable.offered.add(block.block_id)

    def _being_stored(self) -> list[Any]:
        return [
            self._pool.blocks[block_id].block_hash
            for transfer in self._scheduler._store_event_to_blocks.values()
            for block_id in transfer.gpu_block_ids
        ]

    def _has_copy(self, block: Any) -> bool:
        tier = self._scheduler.cpu_block_pool.cached_block_hash_to_block
        return block.block_hash is None or tier.get_one_block(block.block_hash) is not None

    def must_wait(self, tokens: int) -> bool:
        """Whether a new prompt would evict a block that has no copy but can be stored.

        The walk of this step then covers the blocks that it would evict; later prompts wait too.
        """
        needed = sum(-(-tokens // size) for size in self._block_sizes)
        missing = needed - self._pool.kv_cache_manager.available_size()
        if missing <= 0 or all(
            block_id in self.evictable.offered or self._has_copy(block)
            for block_id, block in islice(self.evictable.items(), missing)
        ):
            return False
        # Waiting is pointless if the tier has no free block and no copy is in flight.
        if not self._scheduler._store_event_to_blocks and not (
            self._scheduler.cpu_block_pool.get_num_free_blocks()
        ):
            return False
        self._scheduler._target_free = max(self._target, needed)
        self.full = True
        return True

    def end_step(self) -> None:
        """Reset the state of a step after its walk."""
        self._scheduler._target_free = self._target
        self.full = False

    def trim(self) -> None:
        """Evict blocks above the cap that are in the CPU tier; offer the rest in the next walk."""
        self._trim_next = []
        above = self.above_cap
        if not above:
            return
        stored = set()
        for block_id in self._victims(above):
            block = self.evictable[block_id]
            if self._has_copy(block):
                stored.add(block_id)
            else:
                self._trim_next.append(block)
        if stored:
            self._pool.evict_blocks(stored)

    def _victims(self, count: int) -> list[int]:
        """Return the blocks that kvcached would evict: whole pages first, then in LRU order."""
        return victims(self._pool, count, whole_pages=True)

    def put_back(self, block_ids: list[int]) -> None:
        """Return stored blocks that are still evictable to the head, in their order."""
        for block_id in reversed(block_ids):
            if block_id in self.evictable:
                self.evictable.move_to_end(block_id, last=False)
                self.evictable.offered.add(block_id)


class Lazy(NamedTuple):
    """The order that lazy mode walks; kept on the ``SimpleCPUOffloadScheduler``."""

    order: EvictionOrder


def order_of(scheduler: Any) -> EvictionOrder | None:
    """Return the order that a connector in lazy mode walks, or None in eager mode."""
    kept = state.find(scheduler, Lazy)
    return None if kept is None else kept.order


def around_bind(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Provide kvcached's pool with the queue that lazy mode walks."""
    wrapped(*args, **kwargs)
    bind(instance, EvictionOrder)


def bind(scheduler: Any, order: type[EvictionOrder]) -> None:
    """Provide the pool of a connector in lazy mode with its queue; refused if it is vLLM's own."""
    if scheduler._lazy_mode:
        pool = scheduler._gpu_block_pool
        if not hasattr(pool, "_evictable_blocks"):
            raise not_elastic()
        pool.free_block_queue = state.attach(scheduler, Lazy(order(scheduler, pool))).order


def around_lazy_stores(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Trim the cached blocks to kvcached's cap before the walk, in each step, offers the rest."""
    order = order_of(instance)
    if order is None:
        return wrapped(*args, **kwargs)
    order.trim()
    try:
        return wrapped(*args, **kwargs)
    finally:
        order.end_step()


def around_match(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """In lazy mode, defer a new prompt (None) until the blocks that it evicts have a copy."""
    order = order_of(instance)
    if order is not None and order.full:
        return None, False
    found = wrapped(*args, **kwargs)
    if order is None:
        return found
    request, computed = signature_of_match(*args, **kwargs)
    batch = instance.vllm_config.scheduler_config.max_num_batched_tokens
    # A prompt that is loaded allocates the blocks of the load, and computes nothing yet.
    tokens = found[0] or min(request.num_tokens - computed, batch)
    return (None, False) if order.must_wait(tokens) else found


def signature_of_match(request: Any, num_computed_tokens: int) -> tuple[Any, int]:
    """Return the arguments of ``get_num_new_matched_tokens`` by position."""
    return request, num_computed_tokens


def around_stored(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Keep stored blocks at their place in the order."""
    block_ids = argument(args, kwargs, 0, "gpu_block_ids")
    order = order_of(instance)
    if order is not None:
        # Blocks that a request used meanwhile move to the end, like any used block.
        block_ids = [block_id for block_id in block_ids if block_id not in order.evictable.used]
    wrapped(*args, **kwargs)
    if order is not None:
        order.put_back(block_ids)


def around_free(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """In lazy mode, leave to ``EvictionOrder.trim`` what kvcached evicts when it frees blocks."""
    if not isinstance(instance._evictable_blocks, EvictableBlocks):
        return wrapped(*args, **kwargs)
    cap, instance.max_cached_blocks = instance.max_cached_blocks, -1
    try:
        return wrapped(*args, **kwargs)
    finally:
        instance.max_cached_blocks = cap
