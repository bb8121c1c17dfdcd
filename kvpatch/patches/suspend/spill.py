"""Spilling: storing blocks that only the device has.

A ``Spill`` is the part that all connectors share: which blocks, in which order, and what became
of them. A connector's own part answers what its tier holds, and takes blocks into the store that
it builds in a step.

A block is stored under its key in kvcached's pool, its hash with the number of its group, which
is also its name in the CPU tiers of both connectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpatch.patches.suspend.counts import Counts


class Cached(NamedTuple):
    """A block with a hash on the device.

    Attributes:
        key: its hash and the number of its group, as bytes.
        block: its id on the device.
    """

    key: bytes
    block: int


def cached(pool: Any) -> list[Cached]:
    """Return one block for every key in kvcached's pool, the most recently used first.

    Blocks of requests come before those that nobody uses, whose order is that of their eviction.
    Of a request that has finished the last blocks are evicted first: what is stored first are the
    beginnings of prompts, without which their ends are worth nothing.
    """
    unused, keys = pool._evictable_blocks, pool._block_id_to_key
    one_each = {key: block for block, key in keys.items()}
    used = [Cached(key, block) for key, block in one_each.items() if block not in unused]
    return used + [
        Cached(key, block)
        for block in reversed(unused)
        if (key := keys.get(block)) is not None and one_each[key] == block
    ]


class Tier(ABC):
    """The CPU tier of a connector, seen from its scheduler's side."""

    @abstractmethod
    def why_not(self) -> str:
        """Return why blocks cannot be stored in it, as the end of a sentence; empty if they can."""

    @abstractmethod
    def holds(self, key: bytes) -> bool:
        """Whether a block is in it, and can be loaded."""

    @abstractmethod
    def capacity(self) -> int:
        """Return the blocks that it has room for, in use or not."""

    @abstractmethod
    def keep(self, keys: list[bytes]) -> None:
        """Let blocks that it holds be the last that it evicts, the first of them last of all."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether any transfer is under way, a spill's or the connector's own."""

    @abstractmethod
    def awaits(self, keys: set[bytes]) -> set[bytes]:
        """Return those of blocks whose store into it has not completed."""


# Steps in which a tier takes nothing in, because all that it has is in use, before it is given up.
# Under load that may never end, and a limit waits for it.
PATIENCE = 1000


@dataclass
class Count:
    """What became of the blocks of a spill.

    Attributes:
        resident: blocks on the device when it began.
        fit: those of them that the tier has room for.
        missing: those of them that were not in the tier.
        planned: those of the missing ones whose store was planned.
    """

    resident: int = 0
    fit: int = 0
    missing: int = 0
    planned: int = 0


class Spill:
    """Blocks on their way into a tier; kept on the connector's scheduler.

    Args:
        tier: where they go.
        pool: kvcached's block pool.

    Attributes:
        count: what became of them.
        counts: what became of all that were spilled since the engine started.
        piece: the most blocks of one step.
        alone: whether nothing but the spill is to be stored, because everything is.
    """

    def __init__(self, tier: Tier, pool: Any, piece: int = 1 << 30) -> None:
        self.tier = tier
        self.pool = pool
        self.piece = piece
        self.alone = False
        self.count = Count()
        self.counts = Counts(tier)
        self._reason = "suspend"
        self._blocks: list[Cached] = []
        self._added: set[bytes] = set()
        self._missing: dict[bytes, int] = {}
        self._flying: set[bytes] = set()
        self._refused = 0
        self._tried = False

    def begin(self, blocks: Iterable[Cached], reason: str = "suspend") -> None:
        """Take up blocks, the most important one first.

        Those that the tier has no room for are left out. A tier that is full evicts other blocks
        for these, which are the more recent ones.

        Args:
            blocks: those blocks.
            reason: why their memory is given back, of ``telemetry.suspended.REASONS``.
        """
        self._reason = reason
        self._blocks = list(blocks)
        fit = self._blocks[: self.tier.capacity()]
        there = [one.key for one in fit if self.tier.holds(one.key)]
        self.tier.keep(there)
        held = set(there)
        self._missing = {one.key: one.block for one in fit if one.key not in held}
        self._flying.clear()
        self._added.clear()
        self._refused = 0
        self._tried = False
        self.count = Count(len(self._blocks), len(fit), len(self._missing))

    def more(self, blocks: Iterable[Cached]) -> None:
        """Take up blocks beside those that are on their way, for the reason that it began with."""
        for key, block in blocks:
            self._added.discard(key)
            if key not in self._flying:
                self._missing[key] = block

    def add(self, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Take up other blocks, less important ones, as far as the tier has room beside the first.

        Each is taken up once, whatever becomes of it. The reason is a limit: nothing else evicts
        what has not been taken up.
        """
        room = self.tier.capacity() - len(self._blocks)
        for key, block in blocks:
            if len(self._added) >= room:
                return
            if key not in self._added:
                self._added.add(key)
                if not (key in self._flying or self.tier.holds(key)):
                    self._missing.setdefault(key, block)

    def added(self, key: bytes) -> bool:
        """Whether a block was taken up by ``add``."""
        return key in self._added

    def next(self) -> list[Cached]:
        """Return the blocks to store in this step, without those that have gone meanwhile."""
        found: list[Cached] = []
        gone = []
        for key, block in self._missing.items():
            if len(found) >= self.piece:
                break
            if self.pool._block_id_to_key.get(block) == key and not self.tier.holds(key):
                found.append(Cached(key, block))
            else:
                gone.append(key)
        for key in gone:
            del self._missing[key]
        return found

    def planned(self, keys: Iterable[bytes], ours: bool = True) -> None:
        """Record that the stores of blocks were planned.

        Args:
            keys: those blocks.
            ours: for the spill; if not, by the connector itself, now or before.
        """
        self._tried = True
        planned = [key for key in keys if self._missing.pop(key, None) is not None]
        if planned:
            self._refused = 0
        self._flying.update(planned)
        self.count.planned += len(planned)
        if ours:
            ahead = self._added.intersection(planned)
            self.counts.stored(ahead, "limit")
            self.counts.stored([key for key in planned if key not in ahead], self._reason)

    def no_room(self, forever: bool) -> None:
        """Record that the tier took nothing in.

        Args:
            forever: no store is in flight that would change that.
        """
        self._refused += 1
        self._tried = True
        if forever or self._refused >= PATIENCE:
            self.cancel()

    def cancel(self) -> None:
        """Store nothing more; what is in flight comes to its end."""
        self._missing.clear()

    @property
    def untried(self) -> bool:
        """Whether blocks wait, and no step has planned a store of any yet, or met a full tier."""
        return self.waits and not self._tried

    @property
    def waits(self) -> bool:
        """Whether a block waits for its store to be planned."""
        return bool(self._missing)

    @property
    def busy(self) -> bool:
        """Whether as many blocks wait as one step stores."""
        return len(self._missing) >= self.piece

    @property
    def done(self) -> bool:
        """Whether every store that it can make has completed."""
        return not self._missing and not self._flies(self._flying)

    def settled(self, keys: Collection[bytes]) -> bool:
        """Whether every store that it can make of blocks with these keys has completed."""
        return self._missing.keys().isdisjoint(keys) and not self._flies(keys)

    def _flies(self, keys: Collection[bytes]) -> bool:
        """Whether a store of one of these has not completed.

        This is asked in every step: the tier is asked for one block of them until that is there.
        """
        one = next((key for key in keys if key in self._flying), None)
        if one is None or self.tier.awaits({one}):
            return one is not None
        asked = self._flying.intersection(keys)
        flying = self.tier.awaits(asked)
        self._flying -= asked - flying
        return bool(flying)

    def kept(self) -> int:
        """Return how many of the resident blocks the tier holds now."""
        return sum(self.tier.holds(one.key) for one in self._blocks)
