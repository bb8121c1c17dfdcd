"""The tier that an engine has in the pool, by the connector that it belongs to."""

from __future__ import annotations

import os
import struct
import time
from abc import ABC, abstractmethod
from typing import Any

from kvpatch.patches.host_pool import simple
from kvpatch.patches.host_pool.tier import evict
from kvpatch.pool import stripes
from kvpatch.pool.extents import Extents
from kvpatch.pool.keeper import Keeper
from kvpatch.pool.memory import Memory
from kvpatch.pool.ranks import Failed
from kvpatch.pool.stripes import Stripes
from kvpatch.upstream import connectors
from kvpatch.upstream.vllm_api import chunks_of


class Tier(ABC):
    """The scheduler's side of a CPU tier whose workers have mapped its file."""

    hosts: list[Any]  # objects of vLLM whose methods have to find the tier's part in the pool
    disks: tuple[Any, ...] = ()  # its secondary tiers

    @abstractmethod
    def lay_out(self, file: int, extent: int, told: list[bytes]) -> tuple[Memory, Extents]:
        """Return the memory and the extents of the tier's file, which is the memory's from then on.

        Args:
            extent: bytes of an extent, about.
            told: what each worker has said of its part; Failed is raised if they do not agree.
        """

    @abstractmethod
    def begin(self, keeper: Keeper) -> None:
        """Let chunks be handed out of the keeper's extents, none of which is open yet."""

    @abstractmethod
    def evict(self, index: int) -> int:
        """Evict what can be evicted of an extent, under the keeper's lock; return how much."""


class OffloadingTier(Tier):
    """The tier of OffloadingConnector: a row of the file is a chunk of all ranks."""

    def __init__(self, planner: Any) -> None:
        tiers = planner.manager
        self._manager = getattr(tiers, "primary_tier", tiers)
        self.disks = tuple(getattr(tiers, "secondary_tiers", ()))
        self.hosts = [planner, self._manager, *([tiers] if tiers is not self._manager else [])]
        self.chunks = chunks_of(self._manager, "_num_{}")

    def lay_out(self, file: int, extent: int, told: list[bytes]) -> tuple[Memory, Extents]:
        """Return the tier's memory and extents."""
        size = os.fstat(file).st_size
        return Memory(file), Extents(self.chunks, size // self.chunks, extent, time.monotonic)

    def begin(self, keeper: Keeper) -> None:
        """Let chunks be handed out; the manager finds the extents by its hosts."""
        self._extents = keeper.extents

    def evict(self, index: int) -> int:
        """Evict the blocks of an extent that no transfer uses."""
        return evict(self._manager, self._extents, index)


class SimpleTier(Tier):
    """The tier of SimpleCPUOffloadConnector: each rank has its blocks region by region."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner
        self.hosts = []
        self.chunks = int(planner.cpu_block_pool.num_gpu_blocks) - simple.NULL

    def lay_out(self, file: int, extent: int, told: list[bytes]) -> tuple[Memory, Extents]:
        """Return the tier's memory and extents, each a range of all regions, or raise Failed."""
        try:
            regions = {stripes.unpack(one) for one in told}
        except struct.error:
            regions = set()
        if len(regions) != 1:
            raise Failed("the workers have different regions")
        layout = Stripes(self.chunks + simple.NULL, regions.pop(), len(told))
        if layout.size != os.fstat(file).st_size:
            raise Failed("worker and scheduler have different numbers of blocks")
        return Memory(file, layout.ranges), Extents(
            self.chunks, layout.chunk_bytes, extent, time.monotonic, layout.multiple
        )

    def begin(self, keeper: Keeper) -> None:
        """Put the extents in the place of the queue of the connector's pool."""
        self._queue = simple.put(self._planner, keeper)

    def evict(self, index: int) -> int:
        """Evict the blocks of an extent that nobody uses."""
        return self._queue.evict(index)


def of(connector: Any) -> Tier | None:
    """Return the tier of a scheduler's connector; None for one without chunks, or for none."""
    tier: OffloadingTier | SimpleTier | None = None
    for part in connectors.parts(connector):
        name = type(part).__name__
        if name == connectors.OFFLOADING and part.connector_scheduler is not None:
            tier = OffloadingTier(part.connector_scheduler)
        elif name == connectors.SIMPLE and part.scheduler_manager is not None:
            tier = SimpleTier(part.scheduler_manager)
    return tier if tier is not None and tier.chunks > 0 else None
