"""One component broken at a time, which the world has to find.

A mutation replaces one attribute of kvpatch, vLLM or kvcached for some worlds.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

from kvcached.integration.vllm.allocation_attempt import AllocationAttempt
from kvcached.kv_cache_manager import KVCacheManager
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.fs import manager as fs_manager

from harness.simulate import workers
from kvpatch.patch import Transaction
from kvpatch.patches import deadlock
from kvpatch.patches.fence import hooks
from kvpatch.patches.fence.fence import Fence
from kvpatch.patches.host_pool import connected, simple
from kvpatch.patches.host_pool.simple import Queue
from kvpatch.patches.secondary_tiers import block_files
from kvpatch.patches.secondary_tiers.timeout import Unanswered
from kvpatch.patches.simple_offload import lifetime
from kvpatch.patches.simple_offload.eviction import EvictableBlocks
from kvpatch.pool.extents import Extents
from kvpatch.pool.member import Member
from kvpatch.pool.memory import Memory


class Mutation(NamedTuple):
    """One thing broken.

    Attributes:
        host: the module or class.
        name: its attribute.
        broken: from the original to its replacement.
        kinds: of connectors that use it.
        first: a seed that finds it, played before the others.
    """

    host: Any
    name: str
    broken: Callable[[Any], Any]
    kinds: tuple[str, ...]
    first: int = 1

    def force(self) -> AbstractContextManager[Any]:
        """Break it, within a ``with`` block."""
        return patch.object(self.host, self.name, self.broken(vars(self.host)[self.name]))


def _answers(value: Any) -> Callable[[Any], Any]:
    """Return what puts a function in the place of another that does nothing but answer."""
    return lambda original: lambda *args: value


NOTHING = _answers(None)


def _swallow(read: Any) -> Any:
    def reading(*args: Any) -> None:
        try:
            read(*args)
        except OSError:
            return

    return reading


def _twice(report: Any) -> Any:
    def counting(fence: Any, job: int, workers: int) -> None:
        if job in fence.transfers:
            report(fence, job, workers)
        else:
            fence._named.update({-1 - job: workers})

    return counting


def _keep_used(pop: Any) -> Any:
    def keeping(blocks: Any, block_id: int, *default: Any) -> Any:
        return default[0] if default else pop(blocks, block_id)

    return keeping


def _next_chunk(places: Any) -> Any:
    def shifted(device: Any, tier: Any, per_chunk: int) -> Any:
        found = list(places(device, tier, per_chunk))
        yield from zip(
            [block for block, _ in found],
            [place for _, place in found[1:] + found[:1]],
            strict=True,
        )

    return shifted


def _takes_anyway(take: Any) -> Any:
    def taking(member: Any, size: int) -> bool:
        if not take(member, size):
            member._owner = member._owner._replace(committed=member.committed + size)
        return True

    return taking


def _frees_only(manager: Any, extents: Extents, index: int) -> int:
    for chunk in list(extents.open[index].held):
        extents.release(chunk)
    return 0


def _evicts_all(self: Queue, index: int) -> int:
    """Take back every block of an extent, also those in use."""
    held = list(self._extents.open[index].held)
    for chunk in held:
        block = self._pool.blocks[chunk + simple.NULL]
        self._pool._maybe_evict_cached_block(block)
        self._cached.pop(block.block_id, None)
        self._extents.release(chunk)
    return len(held)


def _finds_still(self: Queue, index: int) -> int:
    """Take back what nobody uses, and leave it in the prefix cache."""
    held = [c for c in self._extents.open[index].held if c + simple.NULL in self._cached]
    for chunk in held:
        del self._cached[chunk + simple.NULL]
        self._extents.release(chunk)
    return len(held)


OFFLOADING = ("offloading", "tiers")
SIMPLE = ("eager", "lazy")
TIERS = ("tiers",)
EVERY = (*OFFLOADING, *SIMPLE)
POOLED = ("pooled",)
SIMPLE_POOLED = ("pooled eager", "pooled lazy")
MUTATIONS = {
    "the fence releases at once": Mutation(
        Fence,
        "split",
        lambda split: lambda *args: ([page for _, pages in args[1] for page in pages], []),
        OFFLOADING,
    ),
    "the fence is blind to plans": Mutation(
        Fence,
        "split",
        lambda split: lambda self, retired, can_plan: split(self, retired, False),
        OFFLOADING,
        6,
    ),
    "the fence is blind to transfers": Mutation(
        Fence, "plan", lambda plan: lambda self, jobs, epoch: plan(self, [], epoch), OFFLOADING, 2
    ),
    "the fence takes one report for all": Mutation(
        Fence,
        "report",
        lambda report: lambda self, job, workers: report(self, job, self.workers),
        OFFLOADING,
        2,
    ),
    "the fence drops reports": Mutation(Fence, "report", NOTHING, OFFLOADING),
    "the fence counts a report twice": Mutation(Fence, "report", _twice, OFFLOADING),
    "an idle engine is not stepped": Mutation(
        Fence, "holding", lambda holding: property(lambda self: 0), OFFLOADING, 168
    ),
    "nothing is released after a step": Mutation(hooks, "release_now", NOTHING, EVERY, 2),
    "a standstill is not broken": Mutation(deadlock, "holds", _answers(False), OFFLOADING, 10),
    "the limit is ignored": Mutation(KVCacheManager, "resize", _answers(True), EVERY),
    "a failed allocation stays": Mutation(AllocationAttempt, "rollback", NOTHING, EVERY, 3),
    "a failed plan stays": Mutation(Transaction, "revert_to", _answers([]), OFFLOADING, 5),
    "files are not checked": Mutation(
        block_files, "seal", _answers(bytes(block_files.FIELDS.size)), TIERS, 3
    ),
    "a failed read counts as read": Mutation(block_files, "_read", _swallow, TIERS, 2),
    "the tier reads another block": Mutation(
        fs_manager,
        "batch_load_block",
        lambda load: lambda paths, *rest: load(paths[::-1], *rest),
        TIERS,
    ),
    "a late disk is waited for": Mutation(
        Unanswered, "late", lambda late: property(lambda self: False), TIERS
    ),
    "a reset keeps the tier's blocks": Mutation(
        CPUOffloadingManager, "reset_cache", NOTHING, ("offloading",)
    ),
    "a copy takes another place": Mutation(workers, "places", _next_chunk, OFFLOADING),
    "eviction offers a block in use": Mutation(EvictableBlocks, "pop", _keep_used, ("lazy",)),
    "an idle engine leaves its copies": Mutation(
        lifetime, "waits_for_copies", _answers(False), SIMPLE, 3
    ),
    # Of worlds with a host pool, which are in a process of their own.
    "the pool is blind to transfers": Mutation(Extents, "begin", NOTHING, POOLED),
    "the pool takes one report for all": Mutation(
        Extents,
        "report",
        lambda report: lambda self, job, workers: report(self, job, 99),
        POOLED,
    ),
    "the pool's limit is ignored": Mutation(Member, "take", _takes_anyway, POOLED),
    "a reset keeps the pool's chunks": Mutation(Extents, "reset", NOTHING, POOLED),
    "what is counted as given back is not": Mutation(Memory, "punch", NOTHING, POOLED),
    "evicted blocks are still found": Mutation(
        connected, "evict", lambda evict: _frees_only, POOLED
    ),
    "a block in use is evicted": Mutation(Queue, "evict", lambda evict: _evicts_all, SIMPLE_POOLED),
    "evicted blocks of the simple connector are still found": Mutation(
        Queue, "evict", lambda evict: _finds_still, SIMPLE_POOLED
    ),
    "a cached block is handed out as free": Mutation(
        Queue,
        "append_n",
        lambda append: lambda self, blocks: self.prepend_n(blocks),
        SIMPLE_POOLED,
    ),
    "the null block has the first chunk": Mutation(simple, "NULL", lambda one: 0, SIMPLE_POOLED),
}
