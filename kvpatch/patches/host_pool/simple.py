"""The scheduler's side of SimpleCPUOffloadConnector: its pool hands out blocks of extents.

vLLM's ``BlockPool`` of the CPU tier keeps what can be handed out in a queue, the blocks to evict
last at its end. ``Queue`` takes its place: blocks without content are the extents', lowest extent
first, and blocks that are cached and unused wait in the order in which vLLM evicts them.

A copy holds its blocks, so that an extent without blocks in use has no transfer either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Any

from kvpatch import state
from kvpatch.patches.host_pool.tier import Pooled
from kvpatch.pool.keeper import Keeper

NULL = 1  # blocks before the first chunk


class Queue:
    """The part of vLLM's ``FreeKVCacheBlockQueue`` that a ``BlockPool`` uses, over extents."""

    def __init__(self, pool: Any, keeper: Keeper) -> None:
        self._pool, self._keeper = pool, keeper
        self._extents, self._lock = keeper.extents, keeper.lock
        self._cached: OrderedDict[int, Any] = OrderedDict()  # cached and unused, by block id
        self.counting = False  # those that nobody uses, and not those at hand

    @property
    def num_free_blocks(self) -> int:
        """The blocks that can be handed out now; while the tier grows, none is evicted for it.

        vLLM takes as many as it was told of, and asks once more then: what was offered stays
        offered until the next step, also where the tier can grow since.
        """
        with self._lock:
            extents = self._extents
            if self.counting:
                return extents.chunks - extents.used + len(self._cached)
            self._evict_draining()
            if not self._keeper.evicts:
                if extents.free and self._keeper.grows:
                    return extents.free
                if not extents.free and self._keeper.need(1):
                    return 0
                self._keeper.evicts = True
            return extents.free + len(self._cached)

    def popleft_n(self, count: int) -> list[Any]:
        """Hand out the lowest blocks without content, then the first evicted, or MemoryError."""
        with self._lock:
            self._evict_draining()
            self._keeper.need(count)
            free = min(count, self._extents.free)
            evicted = list(islice(self._cached, count - free))
            if free + len(evicted) < count:
                raise MemoryError(f"{count} CPU blocks are asked for")
            taken = [chunk + NULL for chunk in self._extents.allocate(range(free))]
            for block_id in evicted:
                del self._cached[block_id]
            self._use(evicted)
            self._extents.reuse.stored(len(evicted))
            if not self._extents.free:
                self._keeper.wake()
            return [self._pool.blocks[block_id] for block_id in (*taken, *evicted)]

    def remove(self, block: Any) -> None:
        """Note that a cached block is in use from now on."""
        with self._lock:
            del self._cached[block.block_id]
            self._use([block.block_id])
            self._extents.reuse.found(1)

    def prepend_n(self, blocks: Sequence[Any]) -> None:
        """Take back blocks without content."""
        with self._lock:
            for block in blocks:
                self._extents.release(block.block_id - NULL)
            if blocks and self._extents.draining():
                self._keeper.wake()

    def append_n(self, blocks: Sequence[Any]) -> None:
        """Take back cached blocks, the last of which is evicted last."""
        with self._lock:
            for block in blocks:
                self._cached[block.block_id] = block
            self._use([block.block_id for block in blocks])
            if blocks and self._extents.draining():
                self._keeper.wake()

    def evict(self, index: int) -> int:
        """Evict the blocks of an extent that nobody uses, under the lock; return how many."""
        held = list(self._extents.open[index].held)
        gone = [chunk for chunk in held if chunk + NULL in self._cached]
        for chunk in gone:
            self._pool._maybe_evict_cached_block(self._cached.pop(chunk + NULL))
            self._extents.release(chunk)
        return len(gone)

    def reset(self) -> None:
        """Take back every block, none of which is in use or cached any more."""
        with self._lock:
            self._cached.clear()
            self._keeper.reset()

    def _evict_draining(self) -> None:
        """Evict what nobody uses in extents that have to go: it is not at hand."""
        for index in self._extents.draining():
            self._keeper.evict(index)

    def _use(self, blocks: Sequence[int]) -> None:
        self._extents.use(block - NULL for block in blocks)


class Simple:
    """The queue of a tier; kept on its ``SimpleCPUOffloadScheduler``."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue


def put(planner: Any, keeper: Keeper) -> Queue:
    """Let the connector's pool hand out blocks of extents, none of which is open yet."""
    pool = planner.cpu_block_pool
    pool.free_block_queue = queue = Queue(pool, keeper)
    return state.attach(planner, Simple(queue)).queue


def around_locked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Have no block evicted for another engine while a method of vLLM's ``Scheduler`` runs."""
    pooled = state.find(instance, Pooled)
    if pooled is None:
        return wrapped(*args, **kwargs)
    with pooled.lock:
        pooled.keeper.evicts = False
        return wrapped(*args, **kwargs)


def around_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Take back every block of a tier that was reset; none is while a block is in use."""
    simple = state.find(instance, Simple)
    if simple is None:
        return wrapped(*args, **kwargs)
    done = around_count(wrapped, instance, args, kwargs)
    if done:
        simple.queue.reset()
    return done


def around_count(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let blocks in use be counted as vLLM does: what is not committed is not in use."""
    simple = state.find(instance, Simple)
    if simple is None:
        return wrapped(*args, **kwargs)
    simple.queue.counting = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        simple.queue.counting = False
