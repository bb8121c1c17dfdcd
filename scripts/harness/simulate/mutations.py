"""One component broken at a time, which the world has to find.

A mutation replaces one attribute of kvpatch, vLLM or kvcached for some worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvcached.integration.vllm import allocation_attempt
from kvcached.kv_cache_manager import KVCacheManager
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.fs import manager as fs_manager

from harness.simulate import workers
from kvpatch.patch import Transaction
from kvpatch.patches import deadlock
from kvpatch.patches.fence import hooks
from kvpatch.patches.fence.fence import Fence
from kvpatch.patches.secondary_tiers import block_files
from kvpatch.patches.secondary_tiers.timeout import Unanswered
from kvpatch.patches.simple_offload import lifetime
from kvpatch.patches.simple_offload.eviction import EvictableBlocks


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

    @contextmanager
    def force(self) -> Iterator[None]:
        """Break it."""
        original = vars(self.host)[self.name]
        setattr(self.host, self.name, self.broken(original))
        try:
            yield
        finally:
            setattr(self.host, self.name, original)


def _swallow(read: Any) -> Any:
    def reading(*args: Any) -> None:
        try:
            read(*args)
        except OSError:
            return

    return reading


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


OFFLOADING = ("offloading", "tiers")
SIMPLE = ("eager", "lazy")
MUTATIONS = {
    "the fence releases at once": Mutation(
        "fence", Fence, "_rule", lambda rule: lambda *args: None, OFFLOADING
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
    "the fence drops reports": Mutation(
        "fence", Fence, "report", lambda report: lambda *args: None, OFFLOADING
    ),
    "the fence counts a report twice": Mutation(
        "fence",
        Fence,
        "report",
        lambda report: (
            lambda self, job, workers: (
                self._named.update({-1 - job: workers})
                if job not in self.transfers
                else report(self, job, workers)
            )
        ),
        OFFLOADING,
    ),
    "an idle engine is not stepped": Mutation(
        "fence", Fence, "holding", lambda holding: property(lambda self: 0), OFFLOADING
    ),
    "nothing is released after a step": Mutation(
        "fence", hooks, "release_now", lambda release: lambda engine: None, (*OFFLOADING, *SIMPLE)
    ),
    "a standstill is not broken": Mutation(
        "standstill", deadlock, "holds", lambda holds: lambda request: False, OFFLOADING
    ),
    "the limit is ignored": Mutation(
        "limits",
        KVCacheManager,
        "resize",
        lambda resize: lambda self, size: True,
        (*OFFLOADING, *SIMPLE),
    ),
    "a failed allocation stays": Mutation(
        "rollback of allocations",
        allocation_attempt.AllocationAttempt,
        "rollback",
        lambda rollback: lambda self: None,
        (*OFFLOADING, *SIMPLE),
    ),
    "a failed plan stays": Mutation(
        "rollback of plans",
        Transaction,
        "revert_to",
        lambda revert: lambda self, count: [],
        OFFLOADING,
    ),
    "files are not checked": Mutation(
        "tiers",
        block_files,
        "_seal",
        lambda seal: lambda path, block: bytes(block_files._FIELDS.size),
        ("tiers",),
    ),
    "a failed read counts as read": Mutation("tiers", block_files, "_read", _swallow, ("tiers",)),
    "the tier reads another block": Mutation(
        "tiers",
        fs_manager,
        "batch_load_block",
        lambda load: lambda paths, *rest: load(paths[::-1], *rest),
        ("tiers",),
    ),
    "a late disk is waited for": Mutation(
        "tiers", Unanswered, "late", lambda late: property(lambda self: False), ("tiers",)
    ),
    "a reset keeps the tier's blocks": Mutation(
        "tiers",
        CPUOffloadingManager,
        "reset_cache",
        lambda reset: lambda self: None,
        ("offloading",),
    ),
    "a copy takes another place": Mutation(
        "offloading", workers, "places", _next_chunk, OFFLOADING
    ),
    "eviction offers a block in use": Mutation(
        "simple connector", EvictableBlocks, "pop", _keep_used, ("lazy",)
    ),
    "an idle engine leaves its copies": Mutation(
        "simple connector",
        lifetime,
        "waits_for_copies",
        lambda waits: lambda scheduler: False,
        SIMPLE,
    ),
}
