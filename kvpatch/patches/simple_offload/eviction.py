"""Lazy mode: kvcached's blocks in the order in which they would be lost.

In lazy mode the connector stores a block only when it is about to be evicted. Each step
it walks vLLM's queue of free blocks for that, up to a target of what two steps can take.
kvcached has no such queue:

- Free memory has no blocks to name. An allocation takes it first, and evicts cached
  blocks, least recently used first, for what is missing.
- The place where a walk stopped means nothing a step later: kvcached may have evicted
  that block, unmapped it, or put it to the end. So a walk begins at the head each
  time, and a block is offered once for each time that it became evictable.
- A block whose copy has ended would go to the end, as if it had been used, and the
  blocks behind it, which no copy has, would be lost first. It goes back to the head.
- Above its cap on cached tokens kvcached evicts inside the very call that frees a
  block, before any walk can see it. Here the blocks above the cap are offered first,
  and evicted in the step after the CPU tier has them.
- A burst of prompts takes more than the target, most of all when they are loaded from
  the CPU tier, since loads do not count as tokens of a step. A new prompt that would
  evict a block without a copy waits the steps that the copy takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

from kvpatch import state
from kvpatch.patch import argument


class EvictableBlocks(OrderedDict[int, Any]):
    """The pool's evictable blocks, least recently used first, and what became of them.

    Takes the place of ``_evictable_blocks`` in kvcached's pool, which takes a block out
    whenever it is used or evicted, also one that is not there.

    Attributes:
        offered: blocks that a walk has offered since they came here.
        used: blocks that were used again while they were not here.
    """

    def __init__(self, blocks: dict[int, Any]) -> None:
        self.offered: set[int] = set()
        self.used: set[int] = set()
        super().__init__(blocks)

    def __setitem__(self, block_id: int, block: Any) -> None:
        self.used.discard(block_id)
        super().__setitem__(block_id, block)

    def pop(self, block_id: int, *default: Any) -> Any:
        """Remove a block, which is in use or evicted from now on."""
        self.offered.discard(block_id)
        if block_id not in self:
            self.used.add(block_id)
        return super().pop(block_id, *default)

    def clear(self) -> None:
        """Remove all blocks."""
        self.offered.clear()
        super().clear()


@dataclass
class FreeMemory:
    """Stands for one block of memory that holds nothing, or nothing left to offer."""

    ref_cnt: int = 0
    block_hash: None = None
    is_null: bool = False


class EvictionOrder:
    """vLLM's ``FreeKVCacheBlockQueue`` of a kvcached pool, as far as lazy mode walks it.

    Args:
        scheduler: the connector's ``SimpleCPUOffloadScheduler``.
        pool: kvcached's ``ElasticBlockPool``.

    Attributes:
        evictable: the pool's evictable blocks.
        full: a prompt waits in this step, and so do those behind it.
    """

    def __init__(self, scheduler: Any, pool: Any) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._nothing = FreeMemory()
        self._trim_next: list[Any] = []
        self._target = scheduler._target_free
        self.full = False
        self._block_sizes = [
            # Up to 0.22 the connector runs without context parallelism only.
            group.kv_cache_spec.block_size * getattr(scheduler, "cp_world_size", 1)
            for group in scheduler.cpu_kv_cache_config.kv_cache_groups
        ]
        self.evictable = EvictableBlocks(pool._evictable_blocks)
        pool._evictable_blocks = self.evictable

    @property
    def above_cap(self) -> int:
        """Cached blocks above kvcached's cap, which wait to be offered or evicted."""
        cap = self._pool.max_cached_blocks
        return 0 if cap < 0 else max(0, len(self.evictable) - cap)

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Iterate in the order in which blocks are lost, from the head.

        What holds nothing, or was offered or is being stored already, is one
        ``FreeMemory``, which counts for the connector's target and is never stored.
        """
        known = set(self._being_stored())
        # Those come back to the head.
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
        # Only when the connector comes back for more: it may have stopped at this one.
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
        """Whether a new prompt would evict a block that has no copy and can have one.

        The walk of this step takes what it would evict, so that it can go on when the
        copies have ended. All prompts that come after it in this step wait too.

        Args:
            tokens: tokens whose blocks the prompt takes in this step.
        """
        needed = sum(-(-tokens // size) for size in self._block_sizes)
        missing = needed - self._pool.kv_cache_manager.available_size()
        if missing <= 0 or all(
            block_id in self.evictable.offered or self._has_copy(block)
            for block_id, block in islice(self.evictable.items(), missing)
        ):
            return False
        # A tier without room for one more block, and no copy that will end, cannot help.
        if not self._scheduler._store_event_to_blocks and not (
            self._scheduler.cpu_block_pool.get_num_free_blocks()
        ):
            return False
        self._scheduler._target_free = max(self._target, needed)
        self.full = True
        return True

    def end_step(self) -> None:
        """Begin anew after the walk of a step."""
        self._scheduler._target_free = self._target
        self.full = False

    def trim(self) -> None:
        """Evict what is above the cap and in the CPU tier; offer the rest in the next walk."""
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
        """Return the blocks that kvcached would evict: whole pages first, then the oldest."""
        victims = self._pool._page_aligned_victims(count)
        chosen = set(victims)
        victims += [block_id for block_id in self.evictable if block_id not in chosen]
        return list(victims[:count])

    def put_back(self, block_ids: list[int]) -> None:
        """Put stored blocks that nobody uses back to the head, in their order."""
        for block_id in reversed(block_ids):
            if block_id in self.evictable:
                self.evictable.move_to_end(block_id, last=False)
                self.evictable.offered.add(block_id)


@dataclass
class Lazy:
    """The order that lazy mode walks, kept on the ``SimpleCPUOffloadScheduler``."""

    order: EvictionOrder


def order_of(scheduler: Any) -> EvictionOrder | None:
    """Return the order that a connector in lazy mode walks, or None in eager mode."""
    kept = state.find(scheduler, Lazy)
    return None if kept is None else kept.order


def around_bind(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Give kvcached's pool the queue that lazy mode walks.

    Wraps ``SimpleCPUOffloadScheduler.bind_gpu_block_pool``.
    """
    wrapped(*args, **kwargs)
    bind(instance, EvictionOrder)


def bind(scheduler: Any, order: type[EvictionOrder]) -> None:
    """Give the pool of a connector in lazy mode the queue that it walks."""
    if scheduler._lazy_mode:
        pool = scheduler._gpu_block_pool
        pool.free_block_queue = state.attach(scheduler, Lazy(order(scheduler, pool))).order


def around_lazy_stores(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Trim kvcached's cached tokens before the walk that offers the rest.

    Wraps ``SimpleCPUOffloadScheduler._prepare_lazy_store_specs``, once a step.
    """
    order = order_of(instance)
    if order is None:
        return wrapped(*args, **kwargs)
    order.trim()
    try:
        return wrapped(*args, **kwargs)
    finally:
        order.end_step()


def around_match(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let a new prompt wait, in lazy mode, until what it evicts has a copy.

    Wraps ``SimpleCPUOffloadScheduler.get_num_new_matched_tokens(request,
    num_computed_tokens)``, where None for the tokens is vLLM's way to say: ask again in
    the next step.
    """
    order = order_of(instance)
    if order is not None and order.full:
        return None, False
    found = wrapped(*args, **kwargs)
    if order is None:
        return found
    request, computed = signature_of_match(*args, **kwargs)
    batch = instance.vllm_config.scheduler_config.max_num_batched_tokens
    # A prompt that is loaded takes the blocks of the load, and computes nothing yet.
    tokens = found[0] or min(request.num_tokens - computed, batch)
    return (None, False) if order.must_wait(tokens) else found


def signature_of_match(request: Any, num_computed_tokens: int) -> tuple[Any, int]:
    """Return the arguments of ``get_num_new_matched_tokens`` by position."""
    return request, num_computed_tokens


def around_stored(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Keep blocks that were stored where they were in the order.

    Wraps ``SimpleCPUOffloadScheduler._process_store_completion(gpu_block_ids, ...)``.
    """
    block_ids = argument(args, kwargs, 0, "gpu_block_ids")
    order = order_of(instance)
    if order is not None:
        # Those that a request used meanwhile go to the end, as any used block does.
        block_ids = [block_id for block_id in block_ids if block_id not in order.evictable.used]
    wrapped(*args, **kwargs)
    if order is not None:
        order.put_back(block_ids)


def around_free(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Keep kvcached from evicting in the call that frees blocks, in lazy mode.

    Wraps ``ElasticBlockPool.free_blocks``; ``EvictionOrder.trim`` evicts instead.
    """
    if not isinstance(instance._evictable_blocks, EvictableBlocks):
        return wrapped(*args, **kwargs)
    cap, instance.max_cached_blocks = instance.max_cached_blocks, -1
    try:
        return wrapped(*args, **kwargs)
    finally:
        instance.max_cached_blocks = cap
