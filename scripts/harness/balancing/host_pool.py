"""Engines of a host pool on traces: kvpatch's keepers, extents and ledger, in simulated time.

Engines compute nothing and their tiers have no memory. A request looks its blocks up in the tier,
computes what is missing and stores it in pieces, as a prompt's blocks come out of a step; what is
not stored when its answer is complete is lost. All else is the code of ``kvpatch.pool``, with its
real files and locks: keepers look when they would, stores wait, and who is asked gives when it
looks next.

Beside it stand fixed parts of the same memory, and one LRU over the blocks of all engines, which
no engine could keep: its memory moves at once, block by block.
"""

import heapq
import itertools
import random
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.balancing.device import PROMPT, STEP
from harness.balancing.traces import BLOCK, Conversation, Turn
from kvpatch.pool import keeper as keeping
from kvpatch.pool import ledger, member
from kvpatch.pool.extents import Extents
from kvpatch.pool.keeper import Keeper
from kvpatch.pool.record import Owner

GIB = 1 << 30
USERS = 8
EXTENT = 64 << 20
PIECE = 8192 // BLOCK  # blocks of a step
AGAIN = 0.02  # seconds after which a store that waits is offered again: a step
WAKES = 0.001  # seconds until a keeper that is woken looks


class Request(NamedTuple):
    """What one engine is asked.

    Attributes:
        at: seconds.
        engine: its number.
        keys: the blocks of 512 tokens of its prompt.
        output: tokens of the answer.
    """

    at: float
    engine: int
    keys: tuple[int, ...]
    output: int


def closed(sessions: Iterable[Conversation], users: int = USERS) -> list[tuple[float, Turn]]:
    """Return the turns of sessions with their times, which users take one after the other."""
    free = [(5.0 * user, user) for user in range(users)]
    found = []
    for session in sessions:
        now, user = heapq.heappop(free)
        for turn in session:
            now += turn.pause
            found.append((now, turn))
            now += turn.prompt / PROMPT * 0.3 + turn.output * STEP
        heapq.heappush(free, (now, user))
    return sorted(found, key=lambda one: one[0])


def in_turns(
    loads: Sequence[Iterable[tuple[float, Turn]]], turn: float, seconds: float
) -> list[Request]:
    """Interleave loads: each goes on for ``turn`` seconds, and stands still while others do.

    Args:
        loads: requests with their times, of each engine.
        turn: seconds; 0 for all at the same time.
        seconds: of each load that are taken.
    """
    found = []
    for number, load in enumerate(loads):
        for own, one in load:
            if own < seconds:
                index, rest = divmod(own, turn) if turn else (0, own)
                at = (index * len(loads) + number) * turn + rest if turn else own
                found.append(Request(at, number, one.keys, one.output))
    return sorted(found, key=lambda one: one[:2])


@dataclass
class Found:
    """What came of a run: blocks that were looked up, and those found, of each engine."""

    looked: list[int]
    hits: list[int]
    given: int = 0  # extents
    lost: int = 0  # blocks that were not stored in time


def parts(requests: Sequence[Request], blocks: int, engines: int) -> Found:
    """Give each engine a fixed part, and an LRU of its own."""
    each = [
        one_lru(
            [one._replace(engine=0) for one in requests if one.engine == number],
            blocks // engines,
            1,
        )
        for number in range(engines)
    ]
    return Found([one.looked[0] for one in each], [one.hits[0] for one in each])


def one_lru(requests: Iterable[Request], blocks: int, engines: int) -> Found:
    """Let one LRU have the blocks of all engines."""
    kept: OrderedDict[tuple[int, int], None] = OrderedDict()
    found = Found([0] * engines, [0] * engines)
    for one in requests:
        keys = [(one.engine, key) for key in one.keys]
        found.looked[one.engine] += len(keys)
        found.hits[one.engine] += sum(1 for _ in itertools.takewhile(kept.__contains__, keys))
        for key in reversed(keys):  # the end of a prompt goes first
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > blocks:
            kept.popitem(last=False)
    return found


class Clock:
    """The seconds of a simulation."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return them."""
        return self.now


class _Nothing:
    """Memory and workers of a tier that is not there."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@dataclass
class _Store:
    """Blocks that a request has computed, and until when they are there."""

    keys: list[int]
    prompt: tuple[int, ...]
    until: float


class Tier:
    """An engine's tier in the pool: vLLM's LRU over the chunks that the extents hand out.

    Args:
        name: of the engine.
        folder: of the ledger.
        size: bytes of the pool.
        block: bytes of a block.
        extent: bytes of an extent, about.
        clock: of the simulation.
    """

    def __init__(
        self, name: str, folder: Path, size: int, block: int, extent: int, clock: Clock
    ) -> None:
        self.extents = Extents(size // block, block, extent, clock.monotonic)
        self.lru: OrderedDict[int, int] = OrderedDict()  # block: its chunk
        self.waiting: deque[_Store] = deque()
        owner = Owner(0, 0, size, 0, extent, 0.0, clock.now, ledger.pid_namespace(), name)
        part = member.join(ledger.record_of(folder, name), size, owner)
        nothing: Any = _Nothing()
        self.keeper = Keeper(
            self.extents, nothing, part, nothing, threading.RLock(), self._evict, clock.monotonic
        )
        self._clock = clock
        self.lost = 0  # blocks that were not stored in time

    def look(self, keys: Sequence[int]) -> int:
        """Return how many blocks of a prompt are found, which are loaded."""
        hits = sum(1 for _ in itertools.takewhile(self.lru.__contains__, keys))
        self.extents.use(self.lru[key] for key in keys[:hits])
        self.extents.reuse.found(hits)
        for key in reversed(keys[:hits]):
            self.lru.move_to_end(key)
        return hits

    def offer(self) -> None:
        """Store what waits, as far as the pool lets it."""
        while self.waiting:
            store = self.waiting[0]
            for index in self.extents.draining():
                self.keeper.evict(index)
            missing = [key for key in store.keys if key not in self.lru]
            if missing and self.keeper.need(len(missing)):
                if self._clock.now < store.until:
                    return
                self.lost += len(missing)
                missing = []  # the request has ended
            while self.extents.free < len(missing) and self.lru:
                _, chunk = self.lru.popitem(last=False)
                self.extents.release(chunk)
            put = missing[: self.extents.free]
            self.lru.update(zip(put, self.extents.allocate(put), strict=True))
            for key in reversed(store.prompt):
                if key in self.lru:
                    self.lru.move_to_end(key)
            self.waiting.popleft()

    def _evict(self, index: int) -> int:
        held: list[Any] = list(self.extents.open[index].held.items())
        for chunk, key in held:
            if self.lru.pop(key, None) is not None:
                self.extents.release(chunk)
        return len(held)


class World:
    """A pool and its engines.

    Args:
        engines: how many.
        size: bytes of the pool.
        block: bytes of a block.
        folder: of the ledger.
        extent: bytes of an extent, about.
    """

    def __init__(self, engines: int, size: int, block: int, folder: Path, extent: int) -> None:
        self.clock = Clock()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        with self._at_its_time():
            self.tiers = [
                Tier(f"engine{number}", folder, size, block, extent, self.clock)
                for number in range(engines)
            ]

    @contextmanager
    def _at_its_time(self) -> Iterator[None]:
        modules = (ledger, member)
        before = [vars(module)["time"] for module in modules]
        for module in modules:
            vars(module)["time"] = self.clock
        try:
            yield
        finally:
            for module, time in zip(modules, before, strict=True):
                vars(module)["time"] = time

    def run(self, requests: Sequence[Request]) -> Found:
        """Serve requests, and return what was found."""
        came = Found([0] * len(self.tiers), [0] * len(self.tiers))
        begun = self.clock.now
        for one in requests:
            self._do_at(begun + one.at, lambda one=one: self._serve(one, came))  # type: ignore[misc]
        end = begun + requests[-1].at if requests else begun
        for tier in self.tiers:
            self._do_at(begun, lambda tier=tier: self._keep(tier))  # type: ignore[misc]
        random.seed(0)
        with self._at_its_time():
            while self._events and self._events[0][0] <= end:
                self.clock.now, _, do = heapq.heappop(self._events)
                do()
            came.given = sum(tier.keeper.evicted // tier.extents.per for tier in self.tiers)
            came.lost = sum(tier.lost for tier in self.tiers)
            for tier in self.tiers:
                tier.keeper.close()
        return came

    def _do_at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), do))

    def _serve(self, request: Request, came: Found) -> None:
        tier = self.tiers[request.engine]
        hits = tier.look(request.keys)
        came.looked[request.engine] += len(request.keys)
        came.hits[request.engine] += hits
        missing = list(request.keys[hits:])
        until = self.clock.now + len(missing) * BLOCK / PROMPT + request.output * STEP
        for first in range(0, len(missing), PIECE):
            piece = missing[first : first + PIECE]
            store = _Store(piece, request.keys, until)
            done = self.clock.now + (first + len(piece)) * BLOCK / PROMPT
            self._do_at(done, lambda store=store: self._store(tier, store))  # type: ignore[misc]

    def _store(self, tier: Tier, store: _Store) -> None:
        begins = not tier.waiting
        tier.waiting.append(store)
        if begins:
            self._offer(tier)

    def _offer(self, tier: Tier) -> None:
        tier.offer()
        if tier.keeper._wake.is_set():
            self._do_at(self.clock.now + WAKES, lambda: self._look(tier))
        if tier.waiting:
            self._do_at(self.clock.now + AGAIN, lambda: self._offer(tier))

    def _keep(self, tier: Tier) -> None:
        """Let a keeper look when it would; see ``Keeper._run``."""
        if not tier.keeper.rests:
            tier.keeper._wake.set()
        self._look(tier)
        pause = keeping.SOON if tier.keeper._asked else keeping.TICK
        self._do_at(self.clock.now + pause, lambda: self._keep(tier))

    def _look(self, tier: Tier) -> None:
        if tier.keeper._wake.is_set():
            tier.keeper._wake.clear()
            tier.keeper.turn()


def pooled(requests: Sequence[Request], size: int, block: int, engines: int) -> Found:
    """Let engines share a host pool."""
    with tempfile.TemporaryDirectory(prefix="kvpatch-sharing-", dir="/dev/shm") as folder:
        Path(folder).chmod(0o700)
        return World(engines, size, block, Path(folder) / "pool", EXTENT).run(requests)
