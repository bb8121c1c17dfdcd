"""The host pool of a world: its engine's part, its workers' devices, and neighbours in the ledger.

The file of the tier, the ledger and what asks the workers are real, and the keeper looks when the
world says so. What a chunk holds is the world's, and is gone when its extent was given back.
"""

from __future__ import annotations

import os
import shutil
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvpatch import state
from kvpatch.patches.host_pool import connected, engine, presence, simple
from kvpatch.patches.host_pool.tier import Pooled
from kvpatch.pool import ledger, member, stripes
from kvpatch.pool.keeper import Keeper
from kvpatch.pool.ranks import Rank
from kvpatch.pool.record import Owner
from kvpatch.status import record
from kvpatch.upstream.vllm_api import region_path

if TYPE_CHECKING:
    from harness.simulate.workers import Copy
    from harness.simulate.world import World

CHUNKS = 2  # of an extent
SIZE = 1 << 20  # that engines start with; worlds lower the limit


def install(now: Any) -> None:
    """Let keepers look, and clocks go, when the current world says so. Once.

    Args:
        now: returns the world's seconds.
    """
    Keeper.start = lambda self: None  # type: ignore[method-assign]
    record.lifted |= {"KVP342"}  # a release whose engines were not tested with a pool
    clock: Any = SimpleNamespace(monotonic=now, sleep=time.sleep)
    for module in (ledger, member, engine, connected):
        vars(module)["time"] = clock
    Keeper.__init__.__defaults__ = (now,)


class Device:
    """What one worker has registered."""

    def __init__(self, pool: Pool, rank: int) -> None:
        self.pool, self.rank = pool, rank
        self.ranges: dict[int, int] = {}

    def __call__(self, wanted: bool, offset: int, size: int) -> bool:
        """Register or deregister a range, as a worker's registrar."""
        if wanted:
            self.ranges[offset] = size
        else:
            del self.ranges[offset]
            self.pool.world.tier.forget(self.pool.chunks(offset, size), self.rank)
        return True

    def has(self, chunk: int) -> bool:
        """Return whether a chunk is registered."""
        at = (chunk - self.pool.null) * self.pool.row
        return any(offset <= at < offset + size for offset, size in self.ranges.items())


class Pool:
    """The pool of a world.

    Args:
        world: whose workers have been made.
        row: bytes of a chunk, all ranks.
    """

    def __init__(self, world: World, row: int) -> None:
        self.world, self.row = world, row
        self.devices = [Device(self, rank) for rank in range(world.mode.workers)]
        self.ranks: list[Rank] = []
        # In the tier of the simple connector a chunk is the block behind the null block.
        self.simple = world.mode.connector in ("eager", "lazy")
        self.null = simple.NULL if self.simple else 0
        self.extent = CHUNKS * row
        self.most = self.limit = SIZE
        engine.EXTENT = engine._SMALLEST = self.extent
        self.neighbour: member.Member | None = None

    def connect(self) -> None:
        """Do what the workers of an engine do when they map its tier."""
        engine_id = self.world.config.kv_transfer_config.engine_id
        chunks, workers = self.world.mode.chunks, self.world.mode.workers
        size, told = chunks * self.row, b""
        if self.simple:
            regions = (self.row // workers,)
            size, told = stripes.Stripes(chunks, regions, workers).size, stripes.pack(regions)
        os.truncate(region_path(engine_id), size)
        socket = ledger.socket_of(ledger.record_of(presence.home(), engine_id))
        self.ranks = [Rank(socket, device, told) for device in self.devices]

    def begin(self) -> None:
        """Take over what the engine has begun."""
        found = state.find(self.world.engine, Pooled)
        assert found is not None
        self.pooled, self.keeper, self.extents = found, found.keeper, found.extents
        owner = Owner(0, 0, SIZE, 0, self.extent, 0.0, 0.0, ledger.pid_namespace(), "neighbour")
        path = ledger.record_of(presence.home(), f"neighbour of {self.world.seed}")
        self.neighbour = member.join(path, SIZE, owner)
        self.set_limit(self.world.random.choice((2, 3, 4, 6, 100)))

    def chunks(self, offset: int, size: int) -> range:
        """Return the chunks of a range, as copies name them."""
        return range(offset // self.row + self.null, (offset + size) // self.row + self.null)

    def touch(self, chunk: int, rank: int, who: str) -> None:
        """Note that a copy of a rank touches a chunk."""
        if not self.devices[rank].has(chunk):
            self.world.violate("pool", f"{who} touches chunk {chunk}, which was given back")

    # What happens

    def look(self, times: int = 1) -> None:
        """Let the keeper look at the ledger."""
        for _ in range(times):
            self.keeper.turn()
            self.world.counts["looks at the pool"] += 1
        self.check()

    def set_limit(self, extents: int) -> None:
        """Move the limit of the pool."""
        self.check()  # what was committed under the limit before may stay for a while
        self.limit = max(1, extents * self.extent)
        assert ledger.set_limit(presence.home(), self.limit)
        self.world.counts["limits of the pool"] += 1

    def neighbour_moves(self, number: int) -> None:
        """Let another engine take an extent, ask for one, or give one back."""
        member = self.neighbour
        assert member is not None
        if number % 3 == 0 and member.committed:
            member.give(self.extent)
        elif number % 3 == 1:
            member.take(self.extent)
        else:
            for peer in member.look(0, 0.0).peers:
                member.ask(peer, self.extent * (1 + number % 2))
                self.world.counts["asked for memory"] += 1

    def check(self) -> None:
        """Check what must hold at any time."""
        member, keeper = self.keeper.member, self.keeper
        committed = sum(self.extents.place(index)[1] for index in self.extents.open)
        if not keeper.memory.committed == member.committed == committed:
            self.world.violate(
                "pool",
                f"the kernel has {keeper.memory.committed} bytes of the tier, its record "
                f"{member.committed}, its extents {committed}",
            )
        assert self.neighbour is not None
        total = member.committed + self.neighbour.committed
        if total > max(self.limit, self.most):
            self.world.violate("pool", f"{total} bytes are committed, {self.limit} are allowed")
        self.most = total  # what is over a lower limit goes down only
        for device in self.devices:
            if set(device.ranges) != {self.extents.place(one)[0] for one in self.extents.open}:
                self.world.violate("pool", f"rank {device.rank} has other extents registered")
        for worker in self.world.workers:
            for copy in worker.copies:
                if not copy.ended:
                    self._must_count(copy, worker.rank)

    def _must_count(self, copy: Copy, rank: int) -> None:
        """Check that a copy in flight keeps what it touches.

        What counts on the blocks in there alone is wrong as soon as they are evicted, which few
        worlds come to while one rank copies and another has ended.
        """
        for _, chunk in copy.pairs:
            extent = self.extents.open.get((chunk - self.null) // self.extents.per)
            if extent is None or not (self._holds(chunk) if self.simple else extent.transfers):
                self.world.violate(
                    "pool", f"nothing counts the copy {copy.job} of rank {rank} to chunk {chunk}"
                )

    def _holds(self, block: int) -> bool:
        """Return whether the simple connector holds a block, as it does while it is copied."""
        planner: Any = self.world.simple
        return bool(planner.cpu_block_pool.blocks[block].ref_cnt)

    def left(self) -> dict[str, int]:
        """Return what must be 0 when all is finished, reset, and was looked at."""
        self.set_limit(0)
        self.look(2)
        return {
            "transfers of the pool": len(self.extents._jobs),
            "bytes of the pool": self.keeper.memory.committed,
        }

    def close(self) -> None:
        """End it; the engine has been shut down."""
        for rank in self.ranks:
            rank.close()
        if self.neighbour is not None:
            self.neighbour.leave()
        shutil.rmtree(presence.home(), ignore_errors=True)
