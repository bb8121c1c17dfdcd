"""One component broken at a time, which the world has to find.

A mutation replaces one attribute of kvpatch, vLLM or kvcached for some worlds.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
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


@dataclass(frozen=True)
class Mutation:
    """One thing broken.

    Attributes:
        component: what it is a part of.
        host: the module or class.
        name: its attribute.
        broken: from the original to its replacement.
        kinds: of connectors that use it.
    """

    component: str
    host: Any
    name: str
    broken: Callable[[Any], Any]
    kinds: tuple[str, ...]

    def force(self) -> AbstractContextManager[Any]:
        """Break it, within a ``with`` block."""
        return patch.object(self.host, self.name, self.broken(vars(self.host)[self.name]))


def _answers(value: Any) -> Callable[[Any], Any]:
    """Return what puts a function in the place of another that does nothing but answer."""
    return lambda original: lambda *args: value


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


OFFLOADING = ("offloading", "tiers")
SIMPLE = ("eager", "lazy")
TIERS = ("tiers",)
EVERY = (*OFFLOADING, *SIMPLE)
MUTATIONS = {
    "the fence releases at once": Mutation(
        "fence",
        Fence,
        "split",
        lambda split: (
            lambda self, retired, can_plan: (
                [page for _, pages in retired for page in pages],
                [],
            )
        ),
        OFFLOADING,
    ),
    "the fence is blind to plans": Mutation(
        "fence",
        Fence,
        "split",
        lambda split: lambda self, retired, can_plan: split(self, retired, False),
        OFFLOADING,
    ),
    "the fence is blind to transfers": Mutation(
        "fence",
        Fence,
        "plan",
        lambda plan: lambda self, jobs, epoch: plan(self, [], epoch),
        OFFLOADING,
    ),
    "the fence takes one report for all": Mutation(
        "fence",
        Fence,
        "report",
        lambda report: lambda self, job, workers: report(self, job, self.workers),
        OFFLOADING,
    ),
    "the fence drops reports": Mutation("fence", Fence, "report", _answers(None), OFFLOADING),
    "the fence counts a report twice": Mutation("fence", Fence, "report", _twice, OFFLOADING),
    "an idle engine is not stepped": Mutation(
        "fence", Fence, "holding", lambda holding: property(lambda self: 0), OFFLOADING
    ),
    "nothing is released after a step": Mutation(
        "fence", hooks, "release_now", _answers(None), EVERY
    ),
    "a standstill is not broken": Mutation(
        "standstill", deadlock, "holds", _answers(False), OFFLOADING
    ),
    "the limit is ignored": Mutation("limits", KVCacheManager, "resize", _answers(True), EVERY),
    "a failed allocation stays": Mutation(
        "rollback of allocations", AllocationAttempt, "rollback", _answers(None), EVERY
    ),
    "a failed plan stays": Mutation(
        "rollback of plans", Transaction, "revert_to", _answers([]), OFFLOADING
    ),
    "files are not checked": Mutation(
        "tiers", block_files, "seal", _answers(bytes(block_files.FIELDS.size)), TIERS
    ),
    "a failed read counts as read": Mutation("tiers", block_files, "_read", _swallow, TIERS),
    "the tier reads another block": Mutation(
        "tiers",
        fs_manager,
        "batch_load_block",
        lambda load: lambda paths, *rest: load(paths[::-1], *rest),
        TIERS,
    ),
    "a late disk is waited for": Mutation(
        "tiers", Unanswered, "late", lambda late: property(lambda self: False), TIERS
    ),
    "a reset keeps the tier's blocks": Mutation(
        "tiers", CPUOffloadingManager, "reset_cache", _answers(None), ("offloading",)
    ),
    "a copy takes another place": Mutation(
        "offloading", workers, "places", _next_chunk, OFFLOADING
    ),
    "eviction offers a block in use": Mutation(
        "simple connector", EvictableBlocks, "pop", _keep_used, ("lazy",)
    ),
    "an idle engine leaves its copies": Mutation(
        "simple connector", lifetime, "waits_for_copies", _answers(False), SIMPLE
    ),
}


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


SIMPLE_POOLED = ("pooled eager", "pooled lazy")
# Of worlds with a host pool, which are in a process of their own.
POOLED_MUTATIONS = {
    "the pool is blind to transfers": Mutation(
        "host pool", Extents, "begin", lambda begin: lambda *args: None, ("pooled",)
    ),
    "the pool takes one report for all": Mutation(
        "host pool",
        Extents,
        "report",
        lambda report: lambda self, job, workers: report(self, job, 99),
        ("pooled",),
    ),
    "the pool's limit is ignored": Mutation(
        "host pool", Member, "take", _takes_anyway, ("pooled",)
    ),
    "a reset keeps the pool's chunks": Mutation(
        "host pool", Extents, "reset", lambda reset: lambda self: None, ("pooled",)
    ),
    "what is counted as given back is not": Mutation(
        "host pool", Memory, "punch", lambda punch: lambda *args: None, ("pooled",)
    ),
    "evicted blocks are still found": Mutation(
        "host pool", connected, "evict", lambda evict: _frees_only, ("pooled",)
    ),
    "a block in use is evicted": Mutation(
        "host pool of the simple connector",
        Queue,
        "evict",
        lambda evict: _evicts_all,
        SIMPLE_POOLED,
    ),
    "evicted blocks of the simple connector are still found": Mutation(
        "host pool of the simple connector",
        Queue,
        "evict",
        lambda evict: _finds_still,
        SIMPLE_POOLED,
    ),
    "a cached block is handed out as free": Mutation(
        "host pool of the simple connector",
        Queue,
        "append_n",
        lambda append: lambda self, blocks: self.prepend_n(blocks),
        SIMPLE_POOLED,
    ),
    "the null block has the first chunk": Mutation(
        "host pool of the simple connector", simple, "NULL", lambda one: 0, SIMPLE_POOLED
    ),
}
