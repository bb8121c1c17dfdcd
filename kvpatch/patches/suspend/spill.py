"""Spilling: storing blocks that only the device has.

A ``Spill`` is the part that all connectors share: which blocks, in which order, and what became
of them. A connector's own part answers what its tier holds, and takes blocks into a step's store.

A block is stored under its key in kvcached's pool, its hash with the number of its group, which
is also its name in the CPU tiers of both connectors. Where a tier stores several blocks under one
name, the key of the last one, they are stored together or not at all (``chunks``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from kvpatch.patches.suspend.chunks import Chunks
from kvpatch.patches.suspend.counts import Counts
from kvpatch.upstream import kvcached_api


class Cached(NamedTuple):
    """A block on the device, by its key: its hash and the number of its group, as bytes."""

    key: bytes
    block: int


class Chunk(NamedTuple):
    """The blocks that a tier stores under one name, in their order, as they are on the device."""

    key: bytes
    blocks: tuple[Cached, ...]


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
    """The CPU tier of a connector, seen from its scheduler's side; its keys are of chunks."""

    blocks_per_chunk = 1

    @abstractmethod
    def why_not(self) -> str:
        """Return why blocks cannot be stored in it, as the end of a sentence; empty if they can."""

    @abstractmethod
    def holds(self, key: bytes) -> bool:
        """Whether a chunk is in it, and can be loaded."""

    def held(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of chunks that are in it, and can be loaded."""
        return [*filter(self.holds, keys)]

    @abstractmethod
    def capacity(self) -> int:
        """Return the chunks that it has room for, in use or not."""

    @abstractmethod
    def keep(self, keys: list[bytes]) -> None:
        """Let chunks that it holds be the last that it evicts, the first of them last of all."""

    def hold(self, everything: bool) -> None:  # noqa: B027, most tiers are an engine's own
        """Let nobody else take memory of it, or let them again."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether any transfer is under way, a spill's or the connector's own."""

    @abstractmethod
    def awaits(self, keys: set[bytes]) -> set[bytes]:
        """Return those of chunks whose store into it has not completed."""


EVERYTHING = 1 << 30  # chunks; more than a tier has
# Steps in which a tier takes nothing in, because all that it has is in use, before it is given up.
# Under load that may never end, and a limit waits for it.
PATIENCE = 1000


@dataclass
class Count:
    """What became of the blocks of a spill."""

    resident: int = 0  # blocks on the device when it began
    # Those of them that fill no chunk, which no tier stores; none where a block is one.
    partial: int = 0
    missing: int = 0  # those of them that were not in the tier, which has room for them
    planned: int = 0  # those of the missing ones whose store was planned


class Spill:
    """Blocks on their way into a tier; kept on the connector's scheduler."""

    def __init__(self, tier: Tier, pool: Any) -> None:
        self.tier = tier
        self.pool = pool
        self.piece = EVERYTHING  # the most chunks of one step
        self.chunks = Chunks(tier.blocks_per_chunk)
        self.alone = False  # nothing else is to be stored, because everything is
        self.count = Count()
        self.counts = Counts(tier)  # of all that were spilled since the engine started
        self.reason = "suspend"  # why their memory is given back, of ``REASONS``
        self._homes: list[tuple[bytes, ...]] = []  # of each block, the chunks that it is part of
        self._taken = 0  # chunks that there is room for
        self._added: set[bytes] = set()
        self._missing: dict[bytes, tuple[Cached, ...]] = {}
        self._flying: set[bytes] = set()
        self._refused = 0
        self._tried = False

    def begin(self, blocks: Iterable[Cached], reason: str = "suspend") -> None:
        """Take up blocks, the most important one first, whose memory is given back for a reason.

        Those that the tier has no room for are left out. A tier that is full evicts other blocks
        for these, which are the more recent ones.
        """
        self.reason = reason
        self.piece = EVERYTHING
        blocks = list(blocks)
        self._homes = [self.chunks.of(one.key) for one in blocks]
        found = self._storable(blocks)
        fit = dict(islice(found.items(), self.tier.capacity()))
        self._taken = len(fit)
        self.tier.keep([key for key, missing in fit.items() if not missing])
        self._missing = {key: missing for key, missing in fit.items() if missing}
        self._flying.clear()
        self._added.clear()
        self._refused = 0
        self._tried = False
        self.count = Count(
            len(blocks),
            sum(found.keys().isdisjoint(home) for home in self._homes),
            sum(map(len, self._missing.values())),
        )

    def plan(self, blocks: Iterable[Cached]) -> dict[str, int]:
        """Return how many of blocks the tier would keep, and how many fill no chunk."""
        homes = [self.chunks.of(one.key) for one in blocks]
        found = self._storable(blocks)
        fit = set(islice(found, self.tier.capacity()))
        kept = sum(not fit.isdisjoint(home) for home in homes)
        partial = sum(found.keys().isdisjoint(home) for home in homes)
        return {
            "resident": len(homes),
            "kept": kept,
            "partial": partial,
            "lost": len(homes) - kept - partial,
        }

    def _storable(self, blocks: Iterable[Cached]) -> dict[bytes, tuple[Cached, ...]]:
        """Return the chunks of blocks, in their order: of each its blocks, or none if it is held.

        Those of which a block is gone cannot be stored.
        """
        found: dict[bytes, tuple[Cached, ...]] = {}
        for key in dict.fromkeys(key for one in blocks for key in self.chunks.of(one.key)):
            if self.tier.holds(key):
                found[key] = ()
            elif whole := self._whole(key):
                found[key] = whole
        return found

    def _whole(self, chunk: bytes) -> tuple[Cached, ...]:
        """Return the blocks of a chunk, if all of them are on the device."""
        found = []
        for key in self.chunks.blocks(chunk):
            block = kvcached_api.block_of(self.pool, key)
            if block is None:
                return ()
            found.append(Cached(key, block))
        return tuple(found)

    def more(self, keys: Iterable[bytes]) -> None:
        """Take up blocks beside those that are on their way, for the reason that it began with."""
        for key in dict.fromkeys(chunk for one in keys for chunk in self.chunks.of(one)):
            self._added.discard(key)
            if key not in self._flying and (whole := self._whole(key)):
                self._missing[key] = whole

    def add(self, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Take up other blocks, less important ones, as far as the tier has room beside the first.

        Each is taken up once, whatever becomes of it. The reason is a limit: nothing else evicts
        what has not been taken up.
        """
        room = self.tier.capacity() - self._taken
        if len(self._added) >= room:
            return
        for key in dict.fromkeys(key for one, _ in blocks for key in self.chunks.of(one)):
            if len(self._added) >= room:
                return
            if key not in self._added:
                self._added.add(key)
                if not (key in self._flying or self.tier.holds(key)) and (
                    whole := self._whole(key)
                ):
                    self._missing.setdefault(key, whole)

    def added(self, key: bytes) -> bool:
        """Whether a block was taken up by ``add``; one that fills no chunk cannot be."""
        chunks = self.chunks.of(key)
        return not chunks or not self._added.isdisjoint(chunks)

    def next(self) -> list[Chunk]:
        """Return the chunks to store in this step, without those that have gone meanwhile."""
        there = self.pool._block_id_to_key
        found: list[Chunk] = []
        gone = []
        for key, blocks in self._missing.items():
            if len(found) >= self.piece:
                break
            is_there = all(there.get(one.block) == one.key for one in blocks)
            if is_there and not self.tier.holds(key):
                found.append(Chunk(key, blocks))
            else:
                gone.append(key)
        for key in gone:
            del self._missing[key]
        return found

    def planned(self, keys: Iterable[bytes], ours: bool = True) -> None:
        """Record that stores of chunks were planned, if not ``ours`` then by the connector."""
        self._tried = True
        planned = {key: blocks for key in keys if (blocks := self._missing.pop(key, None))}
        if planned:
            self._refused = 0
        self._flying.update(planned)
        self.count.planned += sum(map(len, planned.values()))
        if ours:
            ahead = self._added.intersection(planned)
            self.counts.stored(ahead, "limit")
            self.counts.stored([key for key in planned if key not in ahead], self.reason)

    def no_room(self, forever: bool) -> None:
        """Record that the tier took nothing in; ``forever`` without a store in flight."""
        self._refused += 1
        self._tried = True
        if forever or self._refused >= PATIENCE:
            self.cancel()

    def drop(self, keys: Iterable[bytes]) -> None:
        """Store some chunks not at all."""
        for key in keys:
            self._missing.pop(key, None)

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
        chunks = {chunk for key in keys for chunk in self.chunks.of(key)}
        return self._missing.keys().isdisjoint(chunks) and not self._flies(chunks)

    def _flies(self, chunks: Collection[bytes]) -> bool:
        """Whether a store of one of these has not completed.

        This is asked in every step: the tier is asked for one chunk of them until that is there.
        """
        one = next((key for key in chunks if key in self._flying), None)
        if one is None or self.tier.awaits({one}):
            return one is not None
        asked = self._flying.intersection(chunks)
        flying = self.tier.awaits(asked)
        self._flying -= asked - flying
        return bool(flying)

    def holds(self, key: bytes) -> bool:
        """Whether the tier has a block, in any chunk."""
        return any(map(self.tier.holds, self.chunks.of(key)))

    def held(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return those of blocks that the tier has, in any chunk."""
        if self.chunks.size == 1:
            return set(self.tier.held(keys))
        return {*filter(self.holds, keys)}

    def keep(self, keys: Iterable[bytes]) -> None:
        """Let the chunks of blocks that are in the tier be the last that it evicts."""
        chunks = dict.fromkeys(one for key in keys for one in self.chunks.of(key))
        self.tier.keep(self.tier.held(chunks) if self.chunks.size > 1 else list(chunks))

    def is_partial(self, key: bytes) -> bool:
        """Whether a block is in no chunk that the tier has, or could take in."""
        return not any(self.tier.holds(one) or self._whole(one) for one in self.chunks.of(key))

    def lost(self) -> int:
        """Return how many of the resident blocks the tier could hold, and does not now."""
        return max(0, self.count.resident - self.count.partial - self.kept())

    def kept(self) -> int:
        """Return how many of the resident blocks the tier holds; it may have been reset since."""
        return sum(any(map(self.tier.holds, home)) for home in self._homes)
