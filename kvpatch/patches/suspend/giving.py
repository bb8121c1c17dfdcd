"""Giving pages back, a few in each step: what is in them is stored before it is evicted.

For two reasons: an operator or a controller lowered the limit, or the engine has had no requests
for a while (``KVPATCH_IDLE``). kvcached by itself applies a lower limit in the next allocation,
which then evicts what it needs, stored or not; and an idle engine keeps what it has.

    off ──> storing <──> releasing ──> off

In each step the coldest pages are taken up, as many as the time allows: those whose blocks the tier
has are ready, the others when their stores have completed. Those that are ready are evicted some
at a time, because every unmap waits for the workers, and wait for the fence beside the others.

Requests run meanwhile, and their steps take some milliseconds longer because of it. A
lowered limit is applied when enough pages are free, or when no page is left that could be freed:
kvcached then shrinks by itself, as the requests that use the rest end. What has not come into the
tier is evicted for a limit, and kept by an engine that is only idle. Blocks that fill no chunk,
which no tier stores, are evicted in either case.

kvcached's thread reads the limit in /dev/shm ten times a second, and every allocation brings what
it read last: for a moment that is the limit before the one that is being lowered to.

While a limit waits requests take blocks that are free, and then those of the coldest cached blocks,
as under kvcached's own shrinking: no page is mapped from the step on in which these are on their
way into the tier. What they take next is stored ahead, beside the pages that are given back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from itertools import islice
from typing import Any

from kvpatch import state
from kvpatch.logs import log
from kvpatch.patch import argument
from kvpatch.patches.suspend.coldest import Coldest
from kvpatch.patches.suspend.hold import Hold
from kvpatch.patches.suspend.share import Share
from kvpatch.patches.suspend.spill import Cached, Spill
from kvpatch.sizes import readable
from kvpatch.upstream import kvcached_api, kvcached_limits
from kvpatch.upstream.kvcached_api import Page

AHEAD = 1024  # blocks; twice what prompts take in a step of 8,192 tokens
AHEAD_IN_A_STEP = AHEAD // 2  # of them, that are taken up in one step; two milliseconds
TOGETHER = 1024  # blocks that are evicted in one step, about; 3 ms, and one unmap
# Pages for one limit. Requests that run may map pages as fast as others are given back.
MOST_PAGES = 640_000


class Stage(str, Enum):
    """What it waits for: stores, or only the fence."""

    OFF = "off"
    STORING = "storing"
    RELEASING = "releasing"


class Giving:
    """Gives the pages of an engine back; kept on its ``EngineCore`` and on kvcached's manager.

    A suspension uses the same stores, so that it begins only if it ``may``.
    """

    def __init__(self, engine: Any, spill: Spill, may: Callable[[], bool]) -> None:
        self.lost = 0  # blocks that were evicted without a copy, since the engine started
        self.given = 0  # pages that were given back, since the engine started
        self._engine = engine
        self._spill = spill
        self._may = may
        self.busy_at = time.monotonic()  # when the engine last had something to do
        self.rested_for = 0.0  # the ``busy_at`` after which everything was given back
        self.manager = kvcached_api.manager_of(engine)
        self._pool = kvcached_api.pool_of(engine)
        self._hold = state.of(engine.scheduler, Hold)
        self._limit: int | None = None  # bytes of the K or V of one layer, as kvcached has it
        self._apply: Callable[[int], bool] | None = None
        self._failed: int | None = None  # the limit that an error of ours left to kvcached
        self._idle = False
        self._share = Share()
        self._coldest = Coldest(self._pool)
        self._storing: deque[tuple[Page, list[bytes]]] = deque()  # with the keys of its blocks
        self._ready: deque[tuple[Page, list[bytes]]] = deque()
        self._taken: set[int] = set()  # the blocks of both, and those that could not be stored
        self._going: set[int] = set()  # pages that wait for the fence
        self._from: tuple[float, int, int] | None = None  # when it began, given and lost then
        self._pages = 0  # taken up for this limit, or rest
        self._anew = False  # there is another limit, or rest, of which none has been taken up

    # What begins it

    def lower(self, size: int, apply: Callable[[int], bool]) -> bool:
        """Take up a limit in bytes of one layer's K or V, on any thread; whether it is applied."""
        pages = size // self.manager.page_size
        fits = pages >= kvcached_api.pages_in_use(self.manager)
        changes = self._limit is not None or pages != kvcached_api.pages_at_most(self.manager)
        if changes and self._is_of_before(size):
            return False
        if size != self._failed:
            self._failed = None
        if fits or self._failed is not None:
            self._limit = self._apply = None
            return apply(size)
        if not self._may():
            return False  # the next allocation, or look, comes back to it
        if size != self._limit:
            self._limit, self._apply, self._anew = size, apply, True
        self._map_no_more(size)
        self._hold.step_for("limit", True)
        return False

    def _map_no_more(self, size: int) -> None:
        """Let no page be mapped once the blocks that requests take instead are being stored."""
        stored = self.stage is not Stage.OFF and not self._spill.untried
        if stored or not self._pool._evictable_blocks:
            kvcached_limits.map_no_more(self.manager, size)

    def _is_of_before(self, size: int) -> bool:
        """Whether an allocation brings a limit that is no longer the one in /dev/shm."""
        read = kvcached_api.reported_limit(self.manager)
        return size == read and not kvcached_api.is_applied(self.manager)

    def look(self) -> None:
        """Apply the limit that kvcached's thread has read, as an allocation would."""
        reported = kvcached_api.reported_limit(self.manager)
        changed = self._limit not in (None, reported)  # it may have been raised again
        if reported is not None and (changed or kvcached_api.is_above_limit(self.manager)):
            self.manager.resize(reported)
        self.advance()

    def rest(self) -> None:
        """Give everything back that is not used, because nothing has been asked for a while."""
        if not self._idle and self._may():
            self._idle = self._anew = True
            self._hold.step_for("idle", True)

    def stop(self) -> None:
        """Be idle no longer: what is under way comes to its end, and no other page is taken up."""
        self._idle = False
        self._hold.step_for("idle", False)

    @property
    def stage(self) -> Stage:
        """What it waits for."""
        if self._storing or self._ready:
            return Stage.STORING
        return Stage.RELEASING if self._going else Stage.OFF

    @property
    def lowers(self) -> bool:
        """Whether a limit waits to be applied, or pages wait for the fence because of one."""
        return self._limit is not None or (
            self.manager.in_shrink and kvcached_api.has_retired(self.manager)
        )

    @property
    def can_rest(self) -> bool:
        """Whether there may be something to give since the engine was last busy."""
        return not self._idle and self.rested_for != self.busy_at and self._may()

    # What happens by itself

    def advance(self) -> None:
        """Go as far as it goes now; called at every step of the engine."""
        if self.stage is Stage.OFF and self._limit is None and not self._idle:
            self._hold.step_for("limit", False)  # it may have been raised again before a step
            self._share.end()
            return
        if not self._may():
            self._forget()  # a suspension gives everything back
            return
        try:
            runs = self._engine.scheduler.has_unfinished_requests()
            if self._idle and runs:
                self.stop()
            self._share.begin(runs)
            try:
                evicted = self._go_on(runs)
            finally:
                self._share.end()
            if self._limit is not None:
                if not evicted:  # not both in one step
                    self._store_ahead(runs)
                self._map_no_more(self._limit)
        except Exception as error:
            if kvcached_limits.must_end(error):
                raise
            log.exception("kvpatch: pages could not be given back")
            self._failed = self._limit
            self._end()

    def _go_on(self, runs: bool) -> bool:
        """Do a step's share, and return whether pages were evicted in it."""
        wanted = self._limit is not None or self._idle
        if not wanted:  # it was raised again, or a request has come
            if self._storing or self._ready:
                self._spill.cancel()
            self._take_nothing()
        self._count_given()
        while self._storing and self._spill.settled(self._storing[0][1]):
            self._ready.append(self._storing.popleft())
        more = wanted and self._take_up(runs)
        going: list[int] = []
        if self._ready_blocks >= TOGETHER or not more:
            while self._ready and len(going) < TOGETHER:
                going += self._let_go(*self._ready.popleft())
            if going:
                self._pool.evict_blocks(going)
        if not (more or self._storing or self._ready or self._going):
            self._end()
        return bool(going)

    @property
    def _ready_blocks(self) -> int:
        return sum(len(page.blocks) for page, _ in self._ready)

    def _count_given(self) -> None:
        left = self._going - kvcached_api.retired(self.manager)
        if left:  # they were unmapped, or allocated again
            there = self.manager.get_page_occupancy(list(left))
            self.given += sum(not there[page] for page in left)
            self._going -= left

    def _take_up(self, runs: bool) -> bool:
        """Take pages up as far as the time allows, and return whether there may be others."""
        missing = self._missing_pages() - len(self._storing) - len(self._ready)
        if self._anew:
            self._anew, self._pages = False, 0
            reason = "idle" if self._limit is None else "limit"
            if self._storing or self._ready:
                self._spill.reason = reason  # what is on its way comes to its end
            else:
                self._take_nothing()
                self._spill.begin((), reason)
        self._spill.piece = max(1, self._share.stores // self._spill.chunks.size)
        while missing > 0 and self._pages < MOST_PAGES:
            # What is ready and not evicted is looked at again for the next page.
            if self._spill.busy or not self._share.left or self._ready_blocks >= TOGETHER:
                return True
            page = self._coldest.next(self._taken)
            if page is None:
                break
            missing -= 1
            self._pages += 1
            if self._from is None:
                self._from = (time.monotonic(), self.given, self.lost)
            keys = [*map(self._pool._block_id_to_key.__getitem__, page.blocks)]
            there = self._spill.held(keys)
            if not runs:  # so many touches cost a step too much
                self._spill.keep(key for key in reversed(keys) if key in there)
            self._taken.update(page.blocks)
            if len(there) == len(keys):
                self._ready.append((page, keys))
                continue
            self._spill.more(key for key in keys if key not in there)
            self._storing.append((page, keys))
        return False

    def _missing_pages(self) -> int:
        """Return how many pages are to be taken up, those that wait for their stores among them."""
        goal = 0 if self._limit is None else self._limit // self.manager.page_size
        going = len(kvcached_api.retired(self.manager))
        return kvcached_api.pages_in_use(self.manager) - going - goal

    def _store_ahead(self, runs: bool) -> None:
        """Store what allocations evict next, also when the pages under way are given back."""
        if not runs or self._spill.busy:
            return
        keys, taken, unused = self._pool._block_id_to_key, self._taken, self._pool._evictable_blocks
        added = self._spill.added
        middle = next(islice(unused, AHEAD // 2 + len(taken), None), None)
        if middle is None or not added(keys[middle]):
            coldest = islice(unused, AHEAD + len(taken))
            cold = (Cached(keys[block], block) for block in coldest if block not in taken)
            self._spill.add(islice((one for one in cold if not added(one.key)), AHEAD_IN_A_STEP))

    def _let_go(self, page: Page, keys: list[bytes]) -> list[int]:
        """Return the blocks to evict of a page whose stores have completed; none if it is used."""
        there = self._spill.held(keys)
        without = [key for key in keys if key not in there]
        if self._limit is None and not all(map(self._spill.is_partial, without)):
            return []  # an idle engine keeps what it cannot store
        self._taken.difference_update(page.blocks)
        # Without all of its blocks a page gives nothing back.
        now = [*map(self._pool._block_id_to_key.get, page.blocks)]
        if now != keys or not kvcached_api.is_unused(self._pool, page):
            return []
        self.lost += len(without)
        self._going.add(page.number)
        return page.blocks

    def _end(self) -> None:
        """Apply a limit as kvcached does, and stop; an error of ours must not end the engine."""
        limit, apply, idle = self._limit, self._apply, self._idle
        self._log()
        self._forget()
        try:
            if idle:
                self.rested_for = self.busy_at
                self.manager.trim()  # what was mapped ahead of use
            if limit is not None and apply is not None:
                apply(limit)
        except Exception as error:
            if kvcached_limits.must_end(error):
                raise
            log.exception("kvpatch: kvcached did not take a limit")
            self._failed = limit

    def _log(self) -> None:
        if self._from is None:
            return
        (begun, given, lost), self._from = self._from, None
        pages = self.given - given
        if pages or self.lost > lost:
            log.info(
                "kvpatch: %s given back %s in %.2f s, their blocks stored first; %d blocks evicted "
                "without a copy",
                readable(pages * kvcached_api.page_bytes(self.manager)),
                "by an idle engine" if self._limit is None else "for a lower limit",
                time.monotonic() - begun,
                self.lost - lost,
            )

    def _forget(self) -> None:
        self._from = None
        self._limit = self._apply = None
        self._take_nothing()
        self._going.clear()
        self._hold.step_for("limit", False)
        self.stop()

    def _take_nothing(self) -> None:
        self._storing.clear()
        self._ready.clear()
        self._taken.clear()
        self._coldest.forget()


def around_resize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Store what a lower limit evicts before it is applied; called in every allocation."""
    size = int(argument(args, kwargs, 0, "new_mem_size"))
    giving = state.find(instance, Giving)
    if giving is None:
        return bool(wrapped(size))
    return giving.lower(size, lambda size: bool(wrapped(size)))


def around_memory_limit(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse, by ValueError, a limit by revision: the next allocation applies that of /dev/shm."""
    if state.find(instance, Giving) is None:
        return wrapped(*args, **kwargs)
    raise ValueError(
        "kvpatch refuses a limit by revision (set_memory_limit), because the next allocation "
        "applies the limit in /dev/shm over it; use kvpatch.control, kvpatch limit or kvctl limit"
    )
