"""The disk of a tier: its threads run when the world lets them, and its calls can fail."""

from __future__ import annotations

import errno
import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

from vllm.v1.kv_offload.tiering import async_lookup
from vllm.v1.kv_offload.tiering.fs import manager as fs_manager
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from kvpatch.patches.secondary_tiers import block_files

if TYPE_CHECKING:
    from harness.simulate.world import World

FAULTS = ("EIO", "ENOSPC", "short", "open")
DAMAGES = ("flip", "cut", "swap", "delete", "empty")


class Pool(DualQueueThreadPool):  # type: ignore[misc]
    """vLLM's pool without threads."""

    def __init__(self, *threads: int, **names: Any) -> None:
        super().__init__(0, 0)

    def run(self, load: bool) -> bool:
        """Run one task, as a thread of vLLM's pool does; return whether there was one."""
        first, second = self._load_q, self._store_q
        if not load:
            first, second = second, first
        tasks = first or second
        if not tasks:
            return False
        task, state = tasks.popleft()
        try:
            task()
            ended, success, seconds = state.task_done(True, 0.0)
        except Exception:
            ended, success, seconds = state.task_done(False, 0.0)
        if ended:
            self._finished_q.append((state.job_id, success, seconds))
            self._inflight_jobs -= 1
        return True

    def wait_idle(self) -> None:
        """Run all tasks."""
        while self.run(load=True):
            pass


class FaultyOs:
    """``os`` of the block files, with faults of a disk.

    Attributes:
        fault: what fails, or None.
        chance: how often it does.
    """

    def __init__(self) -> None:
        self.world: World | None = None
        self.fault: str | None = None
        self.chance = 0.5

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _fails(self, *faults: str) -> bool:
        world = self.world
        if world is None or self.fault not in faults or world.random.random() >= self.chance:
            return False
        world.counts["disk errors"] += 1
        return True

    def open(self, path: Any, *args: Any, **kwargs: Any) -> int:
        """Open a file, or fail."""
        if self._fails("open"):
            raise OSError(errno.EMFILE, "simulated", str(path))
        return os.open(path, *args, **kwargs)

    def writev(self, file: int, parts: list[Any]) -> int:
        """Write a file, a part of it, or nothing."""
        if self._fails("ENOSPC"):
            raise OSError(errno.ENOSPC, "simulated")
        if self._fails("short"):
            return os.writev(file, parts[:1])
        return os.writev(file, parts)

    def readv(self, file: int, parts: list[Any]) -> int:
        """Read a file, a part of it, or nothing."""
        if self._fails("EIO"):
            raise OSError(errno.EIO, "simulated")
        if self._fails("short"):
            return os.readv(file, parts[:1])
        return os.readv(file, parts)


_FILE = "file"  # the call of a thread that reads or writes, among a tier's unanswered ones
FAULTY = FaultyOs()


def install() -> None:
    """Take the threads away from vLLM's fs tier, and let its files fail."""
    fs_manager.DualQueueThreadPool = Pool
    async_lookup.threading = Mock()  # its threads are never scheduled
    block_files.os = FAULTY  # type: ignore[attr-defined, assignment]


class Disk:
    """The fs tiers of an engine.

    Attributes:
        hangs: no call returns.
    """

    def __init__(self, world: World, tiers: list[Any], root: Path) -> None:
        self.world, self.tiers, self.root = world, tiers, root
        self.hangs = False
        self._inside: set[int] = set()  # tiers and pools of theirs that a call hangs in
        FAULTY.world, FAULTY.fault = world, None
        for tier in tiers:
            tier.unanswered.clock = lambda: world.clock

    def work(self, calls: int) -> None:
        """Let this many of the pending calls return."""
        if not self.hangs:
            self._inside.clear()
        for tier in self.tiers:
            if not self.hangs:
                tier.unanswered.answered(_FILE)
            for _ in range(calls):
                if self.hangs:
                    self._begin(tier)
                    continue
                self._answer(tier._lookup_manager)
                tier._pool.run(load=self.world.random.random() < 0.5)

    def _begin(self, tier: Any) -> None:
        """Let the threads for lookups and for files begin calls that do not return."""
        if id(tier) not in self._inside and not tier._lookup_manager._lookup_queue.empty():
            self._inside.add(id(tier))
            tier.unanswered.asked("probe")
        if id(tier._pool) not in self._inside and tier._pool._inflight_jobs:
            self._inside.add(id(tier._pool))
            tier.unanswered.asked(_FILE)

    def _answer(self, lookups: Any) -> None:
        """Run the lookups' thread for one batch."""
        waiting = lookups._lookup_queue
        try:
            batch = waiting.get_nowait()
        except queue.Empty:
            return
        lookups._lookup_queue = queue.SimpleQueue()
        lookups._lookup_queue.put(batch)
        lookups._lookup_queue.put(None)
        try:
            lookups._worker()
        finally:
            lookups._lookup_queue = waiting

    @property
    def pending(self) -> bool:
        """Whether a call has not returned."""
        return any(
            tier._pool._inflight_jobs or not tier._lookup_manager._lookup_queue.empty()
            for tier in self.tiers
        )

    def files(self) -> Iterator[Path]:
        """Iterate over the block files, in order of name."""
        return iter(sorted(self.root.rglob("*.bin")))

    def damage(self, kind: str) -> None:
        """Damage a block file, as a disk or an operator does."""
        files = list(self.files())
        if not files:
            return
        path = self.world.random.choice(files)
        data = bytearray(path.read_bytes())
        self.world.counts["files damaged"] += 1
        if kind == "delete":
            path.unlink()
            return
        if kind == "flip" and data:
            data[self.world.random.randrange(min(len(data), 256))] ^= 1
        elif kind == "cut":
            del data[len(data) // 2 :]
        elif kind == "swap":
            data = bytearray(self.world.random.choice(files).read_bytes())
        elif kind == "empty":
            data.clear()
        path.write_bytes(data)
