"""Runs one engine in this process with its CPU tier in a host pool, step by step.

A job names the engine's arguments, and whether its blocks are watched. Each line of standard
input is a step; what it saw is in the result when standard output says that it is done. The engine
shuts down at the end of the input.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.engines.block_watch import BlockWatch
from harness.engines.driver import run_round
from harness.engines.engine import Engine
from harness.engines.inside import prepare, tell
from harness.engines.runs import load
from kvpatch import state
from kvpatch.patches.host_pool import presence
from kvpatch.patches.host_pool.tier import Pooled
from kvpatch.pool import ledger
from kvpatch.pool.extents import Extents
from kvpatch.pool.keeper import AHEAD

PATIENCE = 60.0  # seconds in which whatever can happen has


def rank_view(worker: Any) -> dict[str, int]:
    """What a worker has of the tier: resident by its page tables, and registered; by RPC."""
    from kvpatch.hostdevice.copies import HostRegistration

    # By the offset in the file: in one process the scheduler's side, for a disk, maps it once more.
    resident: dict[str, int] = {}
    offset = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            offset = line.split()[2] if "vllm_offload_" in line else ""
        elif offset and line.startswith("Rss:"):
            resident[offset] = max(resident.get(offset, 0), int(line.split()[1]) << 10)
    registered = sum(HostRegistration.ranges.values())
    return {"mapped": sum(resident.values()), "registered": registered}


def least_ahead(extents: Extents) -> int:
    """How many chunks the keeper keeps free for a store to come, whatever was stored."""
    return max(1, extents.per // AHEAD)


class Watched(Engine):
    """An engine, and what the kernel, the ledger and its workers say of its tier."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.part = state.find(self.core, Pooled)
        # The model's own tensors are in another process if there are ranks.
        watches = self.ranks == 1 and job["watch"]
        # A block that finds no memory in time is not stored, and the keeper evicts others.
        self.watch = BlockWatch(self.core, loses=True) if watches else None

    @property
    def pooled(self) -> Pooled:
        """The engine's part in the pool."""
        assert self.part is not None, "the tier is in no pool"
        return self.part

    def see(self) -> dict[str, Any]:
        """Everything that counts the tier's memory, of one moment: the keeper works meanwhile."""
        while True:
            self.until(self.settled)
            before = self.committed
            seen = self.look()
            if self.settled() and self.committed == before:
                return seen

    def look(self) -> dict[str, Any]:
        """Everything that counts the tier's memory, one after the other."""
        keeper = self.pooled.keeper
        shown = ledger.show(presence.home())
        assert shown is not None
        limit, engines = shown
        return keeper.describe() | {
            "kernel": keeper.memory.committed,
            "extent": self.pooled.extents.place(0)[1],
            "records": sum(one.owner.committed for one in engines),
            "limit": limit.current,
            "ranks": self.llm.collective_rpc(rank_view),
        }

    def settled(self) -> bool:
        """Whether the keeper is neither committing an extent nor giving one back now."""
        extents = self.pooled.extents
        with self.pooled.lock:
            going = any(one.closed or one.draining for one in extents.open.values())
            size = sum(extents.place(index)[1] for index in extents.open)
        return not going and size == self.committed == self.pooled.keeper.memory.committed

    @property
    def committed(self) -> int:
        """What the engine's record says."""
        return self.pooled.keeper.member.committed

    def rest(self, with_tiers: bool = False) -> None:
        """Let every copy end, and the keeper do what it wants."""
        super().rest(with_tiers)
        if self.part is not None:
            self.until(lambda: self.little_free and self.settled())

    @property
    def little_free(self) -> bool:
        """Whether no more than an extent is free, and what the keeper always keeps ahead."""
        extents = self.pooled.extents
        return extents.free < extents.per + least_ahead(extents)

    def nothing_ahead(self) -> float:
        """Wait until the keeper keeps nothing free for what was stored a moment ago.

        It may commit that only after all has come to rest: with the next of its looks.
        """
        keeper, least = self.pooled.keeper, least_ahead(self.pooled.extents)
        return self.until(lambda: keeper._ahead <= least and self.little_free and self.settled())

    def until(self, true: Callable[[], bool]) -> float:
        """Wait; return the seconds that it took."""
        began = time.monotonic()
        while not true():
            assert time.monotonic() - began < PATIENCE, self.look()
            time.sleep(0.005)
        return time.monotonic() - began

    def step(self, what: str, value: Any) -> Any:
        """Do one step; return what it saw."""
        if what == "round":
            records = run_round(self, load(value), self.watch)
            self.rest()
            return records
        if what == "burst":
            return run_round(self, value, None)
        if what == "nothing ahead":
            return self.nothing_ahead()
        if what == "reset":
            assert self.llm.reset_prefix_cache(reset_connector=True)
            extent = self.pooled.extents.place(0)[1]
            return self.until(lambda: self.pooled.keeper.memory.committed <= extent)
        if what == "limit":
            assert ledger.set_limit(presence.home(), value)
            return self.until(lambda: self.pooled.keeper.memory.committed <= value)
        if what == "alone":
            # The keeper looks; nothing of the engine's does.
            return self.until(lambda: self.pooled.keeper.describe()["engines"] == 1)
        assert what == "see", what
        return self.see()


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    prepare(job)
    watched = Watched(job)
    result: dict[str, Any] = {}

    def write() -> None:
        Path(result_path).write_text(json.dumps(result))

    tell("ready")
    for line in sys.stdin:
        result["seen"] = watched.step(*json.loads(line))
        watch = watched.watch
        result["returned"], result["changed"] = (
            (watch.returned, watch.changed) if watch else (0, [])
        )
        write()
        tell("done")
    watched.llm.llm_engine.engine_core.shutdown()
    result["left"] = ledger.show(presence.home()) is not None
    write()
