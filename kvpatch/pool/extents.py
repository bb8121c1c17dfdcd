"""The extents of a tier: which of its chunks can be handed out, and what may be given back.

    absent    a hole of the file
    open      committed and registered: its chunks can be handed out
    draining  open, but it has to go: no chunk of it is handed out, and what it holds is evicted
    closed    empty and being given back

Nothing here is safe for threads; the caller has a lock.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from kvpatch.pool.worth import Reuse

# When an empty extent was used. Not 0, which says that there is no extent; no clock of a running
# machine is as low.
_EMPTY = 1e-9
# Seconds by which a chunk counts for colder than the one before it: of a prompt whose beginning is
# evicted the rest is of no use, so the end goes first, as in vLLM's own order.
BEHIND = 1e-6


@dataclass
class Extent:
    """Some whole chunks, one behind the other.

    Attributes:
        free: its chunks that hold nothing, the lowest last.
        held: what each of the other chunks holds.
        transfers: how many transfers name one of its chunks.
        used: when a chunk of it was used last, by the caller's clock; 0 for never.
        draining, closed: as above.
        ranked: its last use when it was ranked among the others.
    """

    free: list[int]
    held: dict[int, Hashable] = field(default_factory=dict)
    transfers: int = 0
    used: float = 0.0
    draining: bool = False
    closed: bool = False
    ranked: float = _EMPTY

    @property
    def last_use(self) -> float:
        """When it was used last; empty ones are colder than any other."""
        return self.used if self.held else _EMPTY

    @property
    def idle(self) -> bool:
        """Whether nobody can touch its bytes."""
        return not self.held and not self.transfers


class Extents:
    """The extents of one tier.

    Args:
        chunks: of the tier, whose chunks are [0, chunks).
        chunk_bytes: of each.
        extent_bytes: of each extent, about: at least a chunk.
        multiple: chunks of an extent are a multiple of it, if the tier has as many.
        clock: seconds; any that all engines of the machine have in common.

    Attributes:
        per: chunks of an extent; the last one may have less.
        count: extents of the tier.
        open: the extents that are not absent, by index.
        used: chunks that hold something.
        reuse: how often what they hold is found.
    """

    def __init__(
        self,
        chunks: int,
        chunk_bytes: int,
        extent_bytes: int,
        clock: Callable[[], float],
        multiple: int = 1,
    ) -> None:
        self.chunks = chunks
        self.chunk_bytes = chunk_bytes
        whole = extent_bytes // chunk_bytes // multiple * multiple
        self.per = min(max(whole, multiple), chunks)
        self.count = -(-chunks // self.per)
        self.open: dict[int, Extent] = {}
        self.used = 0
        self.reuse = Reuse(clock)
        self._clock = clock
        self._roomy: list[int] = []  # extents that chunks can be handed out of, in order
        self._free = 0  # chunks of those
        self._next = 0  # every extent below it is not absent
        self._draining: set[int] = set()
        self._closed: dict[int, None] = {}
        self._idle: list[int] = []  # extents that could be closed, in order
        # The keeper looks ten times a second, under the scheduler's lock. Extents are ranked by
        # their last use, the highest of equals first; one that was used since has its rank renewed
        # when it is the coldest. Those that hold nothing are ranked by themselves.
        self._ranks: list[tuple[float, int]] = []
        self._empty: list[int] = []  # the negative indices
        self._jobs: dict[int, tuple[int, tuple[int, ...]]] = {}

    # Chunks, for the scheduler

    @property
    def free(self) -> int:
        """How many chunks can be handed out."""
        return self._free

    def allocate(self, keys: Sequence[Hashable]) -> list[int]:
        """Hand out a chunk for each key, from the lowest extents that have one.

        Raises:
            MemoryError: fewer are free; none is handed out.
        """
        if len(keys) > self._free:
            raise MemoryError(f"{len(keys)} chunks are asked for, and {self._free} are free")
        taken: list[int] = []
        now = self._clock()
        while len(taken) < len(keys):
            index = self._roomy[0]
            extent = self.open[index]
            self._set_idle(index, False)
            was_empty, at = not extent.held, now - BEHIND * len(taken)
            while extent.free and len(taken) < len(keys):
                chunk = extent.free.pop()
                extent.held[chunk] = keys[len(taken)]
                taken.append(chunk)
            extent.used = max(extent.used, at) if not was_empty else at
            if was_empty:
                self._rank(index, extent)
            if not extent.free:
                del self._roomy[0]
        self._free -= len(taken)
        self.used += len(taken)
        self.reuse.stored(len(taken))
        return taken

    def release(self, chunk: int) -> None:
        """Take back a chunk, which holds nothing any more."""
        index = chunk // self.per
        extent = self.open[index]
        del extent.held[chunk]
        self.used -= 1
        bisect.insort(extent.free, chunk, key=lambda one: -one)
        if not extent.draining and not extent.closed:
            self._free += 1
            if len(extent.free) == 1:
                bisect.insort(self._roomy, index)
        if not extent.held:
            self._rank(index, extent)
            self._set_idle(index, extent.idle and not extent.closed)

    def use(self, chunks: Iterable[int]) -> None:
        """Note that chunks are used now, those of a prompt from its beginning."""
        now = self._clock()
        for chunk in chunks:
            extent = self.open.get(int(chunk) // self.per)
            if extent is not None and extent.used < now:
                extent.used = now
            now -= BEHIND

    def reset(self) -> None:
        """Take back every chunk."""
        for index, extent in self.open.items():
            taken = len(extent.held)
            if taken and not extent.draining and not extent.closed:
                self._free += taken
                if not extent.free:
                    bisect.insort(self._roomy, index)
            extent.free = sorted([*extent.free, *extent.held], reverse=True)
            extent.held.clear()
            self._set_idle(index, extent.idle and not extent.closed)
        self.used = 0
        self._rank_all()

    # Transfers

    def begin(self, job: int, chunks: Iterable[int], workers: int) -> None:
        """Note that a transfer names chunks, until as many workers have reported its end."""
        touched = tuple({int(chunk) // self.per for chunk in chunks})
        self._jobs[job] = (workers, touched)
        for index in touched:
            self.open[index].transfers += 1
            self._set_idle(index, False)

    def report(self, job: int, workers: int) -> None:
        """Note that a transfer has ended on some workers."""
        if job not in self._jobs:
            return
        left, touched = self._jobs[job]
        if left > workers:
            self._jobs[job] = (left - workers, touched)
            return
        del self._jobs[job]
        for index in touched:
            extent = self.open[index]
            extent.transfers -= 1
            self._set_idle(index, extent.idle and not extent.closed)

    @property
    def transferring(self) -> bool:
        """Whether a transfer has not ended."""
        return bool(self._jobs)

    # Extents, for the keeper

    def place(self, index: int) -> tuple[int, int]:
        """Return the offset of an extent in the tier and its size, in bytes."""
        chunks = min(self.per, self.chunks - index * self.per)
        return index * self.per * self.chunk_bytes, chunks * self.chunk_bytes

    def absent(self) -> int | None:
        """Return the lowest absent extent, or None."""
        while self._next in self.open:
            self._next += 1
        return self._next if self._next < self.count else None

    def add(self, index: int) -> None:
        """Note that an absent extent is open now."""
        first = index * self.per
        end = min(first + self.per, self.chunks)
        self.open[index] = Extent(list(range(end - 1, first - 1, -1)))
        self._free += end - first
        bisect.insort(self._roomy, index)
        self._rank(index, self.open[index])
        self._set_idle(index, True)

    def drain(self, index: int) -> None:
        """Hand out no more chunks of an extent; it has to go."""
        extent = self.open[index]
        if not extent.draining:
            extent.draining = True
            self._draining.add(index)
            self._withhold(index, extent)

    def draining(self) -> list[int]:
        """Return the extents that have to go and hold something."""
        if not self._draining:
            return []
        return [index for index in self._draining if self.open[index].held]

    @property
    def going(self) -> int:
        """Bytes of the extents that have to go."""
        return sum(self.place(index)[1] for index in self._draining)

    def close(self, index: int) -> None:
        """Hand out no more chunks of an idle extent, which is being given back."""
        extent = self.open[index]
        assert extent.idle, f"extent {index} is in use"
        if not extent.draining:
            self._withhold(index, extent)
        extent.closed = True
        self._closed[index] = None
        self._set_idle(index, False)

    def remove(self, index: int) -> None:
        """Note that a closed extent is absent now."""
        assert self.open[index].closed, f"extent {index} is not closed"
        del self.open[index]
        self._draining.discard(index)
        del self._closed[index]
        self._next = min(self._next, index)

    def closed(self) -> list[int]:
        """Return the extents that are being given back."""
        return list(self._closed)

    def coldest(self) -> int | None:
        """Return the coldest extent that need not go yet; empty ones are colder than others."""
        while self._empty:
            extent = self.open.get(-self._empty[0])
            if extent is not None and not (extent.held or extent.draining or extent.closed):
                return -self._empty[0]
            heapq.heappop(self._empty)
        return self._coldest_of_held()

    def last_use(self) -> float:
        """Return when the coldest extent was used last; 0 if there is none."""
        index = self.coldest()
        return 0.0 if index is None else self.open[index].last_use

    def last_use_of_held(self) -> float:
        """Return when the coldest extent that holds something was used last; 0 if none does."""
        index = self._coldest_of_held()
        return 0.0 if index is None else self.open[index].used

    def _coldest_of_held(self) -> int | None:
        while self._ranks:
            ranked, negative = self._ranks[0]
            extent = self.open.get(-negative)
            if extent is None or extent.draining or extent.closed or ranked != extent.ranked:
                heapq.heappop(self._ranks)
            elif ranked != extent.used:
                extent.ranked = extent.used
                heapq.heapreplace(self._ranks, (extent.ranked, negative))
            else:
                return -negative
        return None

    def idle(self) -> list[int]:
        """Return the extents that could be closed, the highest first."""
        return self._idle[::-1]

    def _set_idle(self, index: int, idle: bool) -> None:
        at = bisect.bisect_left(self._idle, index)
        if (at < len(self._idle) and self._idle[at] == index) == idle:
            return
        if idle:
            self._idle.insert(at, index)
        else:
            del self._idle[at]

    def _rank(self, index: int, extent: Extent) -> None:
        """Rank an extent that is empty now, or was until now; its earlier rank is passed over."""
        extent.ranked = extent.last_use
        if extent.held:
            heapq.heappush(self._ranks, (extent.ranked, -index))
        else:
            heapq.heappush(self._empty, -index)
        if max(len(self._ranks), len(self._empty)) > 2 * len(self.open) + 100:
            self._rank_all()

    def _rank_all(self) -> None:
        every = self.open.items()
        for _, extent in every:
            extent.ranked = extent.last_use
        self._ranks = [(extent.ranked, -index) for index, extent in every if extent.held]
        self._empty = [-index for index, extent in every if not extent.held]
        heapq.heapify(self._ranks)
        heapq.heapify(self._empty)

    def _withhold(self, index: int, extent: Extent) -> None:
        if extent.free:
            self._free -= len(extent.free)
            self._roomy.remove(index)
