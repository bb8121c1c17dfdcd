"""Giving pages back piece by piece: each is stored before it is evicted.

For two reasons: an operator or a controller lowered the limit, or the engine has had no requests
for a while (``KVPATCH_IDLE``). kvcached by itself applies a lower limit in the next allocation,
which then evicts what it needs, stored or not; and an idle engine keeps what it has.

    off ──> storing ──> releasing ──> off
               ^            │  more to give
               └────────────┘

Requests run meanwhile. A lowered limit is applied when enough pages are free, or when no page is
left that could be freed: kvcached then shrinks by itself, as the requests that use the rest end.
What has not come into the tier is evicted for a limit, and kept by an engine that is only idle.
Blocks that fill no chunk, which no tier stores, are evicted in either case.

kvcached's thread reads the limit in /dev/shm ten times a second, and every allocation brings what
it read last: for a moment that is the limit before the one that is being lowered to, and nobody's
wish.

While a limit waits requests take blocks that are free, and then those of the coldest cached blocks,
as under kvcached's own shrinking: no page is mapped from the step on in which these are on their
way into the tier. What they take next is stored ahead, beside the piece that is given back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from itertools import islice
from typing import Any

from kvpatch import state
from kvpatch.logs import log
from kvpatch.patch import argument
from kvpatch.patches.suspend import revision
from kvpatch.patches.suspend.hold import Hold
from kvpatch.patches.suspend.spill import Cached, Spill
from kvpatch.sizes import readable
from kvpatch.upstream import kvcached_api, kvcached_limits

PIECE = 64  # pages at a time
AHEAD = 1024  # blocks; twice what prompts take in a step of 8,192 tokens
# Pieces for one limit. Requests that run may map pages as fast as others are given back.
MOST_PIECES = 10_000


class Stage(str, Enum):
    """Where a piece is."""

    OFF = "off"
    STORING = "storing"
    RELEASING = "releasing"


class Giving:
    """Gives the pages of an engine back; kept on its ``EngineCore`` and on kvcached's manager.

    Args:
        engine: the ``EngineCore``.
        spill: stores into the tier of its connector.
        may: whether it may begin; a suspension uses the same stores.

    Attributes:
        stage: where it is.
        lost: blocks that were evicted without a copy, since the engine started.
        given: pages that were given back, since the engine started.
        manager: kvcached's, of the engine's pages.
        busy_at: when the engine last had something to do, by the monotonic clock.
        rested_for: the ``busy_at`` after which everything was given back.
    """

    def __init__(self, engine: Any, spill: Spill, may: Callable[[], bool]) -> None:
        self.stage = Stage.OFF
        self.lost = 0
        self.given = 0
        self._engine = engine
        self._spill = spill
        self._may = may
        self.busy_at = time.monotonic()
        self.rested_for = 0.0
        self.manager = kvcached_api.manager_of(engine)
        self._pool = kvcached_api.pool_of(engine)
        self._hold = state.of(engine.scheduler, Hold)
        self._limit: int | None = None  # bytes of the K or V of one layer, as kvcached has it
        self._apply: Callable[[int], bool] | None = None
        self._failed: int | None = None  # the limit that an error of ours left to kvcached
        self._idle = False
        self._kept: set[int] = set()  # blocks that an idle engine could not store
        self._pages: list[list[Cached]] = []
        self._going: set[int] = set()  # pages that wait for the fence
        self._pieces = 0
        self._before = 0
        self._from: tuple[float, int, int] | None = None  # when it began, given and lost then
        revision.note(self.manager, 0)

    # What begins it

    def lower(self, size: int, apply: Callable[[int], bool]) -> bool:
        """Take a new limit up, on any thread; return whether it is applied now.

        Args:
            size: bytes of the K or V of one layer.
            apply: kvcached's own ``resize``.
        """
        if size != kvcached_api.reported_limit(self.manager):
            revision.note(self.manager, size)
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
            self._limit, self._apply, self._pieces = size, apply, 0
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
        stale = revision.waits(self.manager) or not kvcached_api.is_applied(self.manager)
        return size == read and stale

    def look(self) -> None:
        """Apply the limit that kvcached's thread has read, as an allocation would."""
        revision.publish(self.manager)
        reported = kvcached_api.reported_limit(self.manager)
        changed = self._limit not in (None, reported)  # it may have been raised again
        if reported is not None and (changed or kvcached_api.is_above_limit(self.manager)):
            self.manager.resize(reported)
        self.advance()

    def rest(self) -> None:
        """Give everything back that is not used, because nothing has been asked for a while."""
        if not self._idle and self._may():
            self._idle, self._pieces = True, 0
            self._kept.clear()
            self._hold.step_for("idle", True)

    def stop(self) -> None:
        """Be idle no longer: what is under way comes to its end, and no other piece begins."""
        self._idle = False
        self._hold.step_for("idle", False)

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
        revision.publish(self.manager)
        if self.stage is Stage.OFF and self._limit is None and not self._idle:
            self._hold.step_for("limit", False)  # it may have been raised again before a step
            return
        if not self._may():
            self._forget()  # a suspension gives everything back
            return
        try:
            if self._idle and self._engine.scheduler.has_unfinished_requests():
                self.stop()
            while self._move():
                pass
            if self._limit is not None:
                self._store_ahead()
                self._map_no_more(self._limit)
        except Exception as error:
            if kvcached_limits.must_end(error):
                raise
            log.exception("kvpatch: pages could not be given back")
            self._failed = self._limit
            self._end()

    def _move(self) -> bool:
        if self.stage is Stage.STORING and self._limit is None and not self._idle:
            self._spill.cancel()  # a request has come
            self.stage = Stage.OFF
        if self.stage is Stage.STORING:
            keys = [one.key for page in self._pages for one in page]
            return self._spill.settled(keys) and self._evict()
        if self.stage is Stage.RELEASING:
            # Under load there are always others.
            if self._going & kvcached_api.retired(self.manager):
                return False
            now = kvcached_api.pages_in_use(self.manager)
            self.given += max(0, self._before - now)
            self.stage = Stage.OFF
        return self._begin_piece()

    def _begin_piece(self) -> bool:
        """Begin the next piece; False if there is nothing to give."""
        if self._limit is None and not self._idle:
            self._end()
            return False
        self._before = kvcached_api.pages_in_use(self.manager)
        goal = 0 if self._limit is None else self._limit // self.manager.page_size
        going = len(kvcached_api.retired(self.manager))
        wanted = min(PIECE, self._before - going - goal)
        pages = kvcached_api.unused_pages(self._pool)
        if self._limit is None:
            pages = [blocks for blocks in pages if self._kept.isdisjoint(blocks)]
        if wanted <= 0 or not pages or self._pieces >= MOST_PIECES:
            self._end()
            return False
        self._pieces += 1
        if self._from is None:
            self._from = (time.monotonic(), self.given, self.lost)
        keys = self._pool._block_id_to_key
        self._pages = [[Cached(keys[block], block) for block in page] for page in pages[:wanted]]
        # The last used page is the most important one.
        blocks = (one for page in reversed(self._pages) for one in reversed(page))
        self._spill.begin(blocks, "idle" if self._limit is None else "limit")
        self.stage = Stage.STORING
        return True

    def _store_ahead(self) -> None:
        """Store what allocations evict next, also when the piece under way is given back."""
        if self._engine.scheduler.has_unfinished_requests():
            keys, unused = self._pool._block_id_to_key, self._pool._evictable_blocks
            piece = {one.block for page in self._pages for one in page}
            coldest = islice((block for block in unused if block not in piece), AHEAD)
            self._spill.add(Cached(keys[block], block) for block in coldest)

    def _evict(self) -> bool:
        unused, keys = self._pool._evictable_blocks, self._pool._block_id_to_key
        gone: set[int] = set()
        for page in self._pages:
            blocks = {one.block for one in page}
            without = {one.block for one in page if not self._spill.holds(one.key)}
            # What fills no chunk is never stored, and is a few blocks at the end of a prompt.
            if self._limit is None and any(
                one.block in without and not self._spill.is_partial(one.key) for one in page
            ):
                self._kept |= blocks  # without all of its blocks a page gives nothing back
                continue
            still = {
                one.block for one in page if one.block in unused and keys.get(one.block) == one.key
            }
            self.lost += len(without & still)
            gone |= still
        before = kvcached_api.retired(self.manager)
        self._pool.evict_blocks(gone)
        self._going = kvcached_api.retired(self.manager) - before
        self.stage = Stage.RELEASING
        return True

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
        """Say what was given back since it began, and why."""
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
        self.stage = Stage.OFF
        self._hold.step_for("limit", False)
        self.stop()


def around_resize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Store what a lower limit evicts before it is applied.

    Wraps kvcached's ``KVCacheManager.resize(new_mem_size)``, which is called in every allocation
    with the limit that is in the pool in /dev/shm.
    """
    size = int(argument(args, kwargs, 0, "new_mem_size"))
    giving = state.find(instance, Giving)
    if giving is None:
        return bool(wrapped(size))
    return giving.lower(size, lambda size: bool(wrapped(size)))
