"""The fence: which retired pages may be unmapped now. Pure: no vLLM and no kvcached.

kvcached unmaps a page when its last block is freed. vLLM's OffloadingConnector
copies blocks after that: it launches a store one step after it planned it, and
plans a request's last stores after the request's blocks were freed. The copy would
read a scratch page, and be loaded later as this prompt's KV.

So a freed page stays on kvcached's own list of retired pages, from which its blocks can
be allocated again immediately, until

    planned     the connector has built the transfers of one step since the free, after
                which no transfer that references the page's blocks can be planned; and
    named       no transfer that references one of its blocks is queued or in flight.

A transfer is in flight from the time the scheduler passes it to the workers until every
worker has reported it; the connector's own record is not used, because resetting its
cache drops transfers that are in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

Retired = list[tuple[int, list[int]]]


class Transfer(NamedTuple):
    """One transfer job: its request and the device blocks that it references."""

    request: str
    blocks: tuple[int, ...]


@dataclass
class Counters:
    """The fence's counts so far."""

    released: int = 0  # pages released through the fence
    held_for_plan: int = 0  # pages held until the next step's transfers were built
    held_for_transfer: int = 0  # pages held until a transfer completed
    longest_hold: int = 0  # most steps that a page was held


class Fence:
    """Decides which retired pages may be unmapped now.

    Args:
        blocks_of_page: returns the block ids ``[start, end)`` of a page.
        workers: reports that complete a transfer, one per worker.
        pinned: the connector holds a reference to every block of a transfer until it has
            completed. No transfer then references a freed page, which only waits for the
            computation.
    """

    def __init__(
        self,
        blocks_of_page: Callable[[int], tuple[int, int]],
        workers: int,
        pinned: bool = False,
    ) -> None:
        self.counters = Counters()
        self.transfers: dict[int, Transfer] = {}
        self.blocks_of_page = blocks_of_page
        self.pinned = pinned
        self.workers = workers
        self._reports: Counter[int] = Counter()
        self._named: Counter[int] = Counter()
        self._planned_epoch = 0
        self._builds = 0
        self.changes = 0  # how often a page began or ceased to be held
        self._since: dict[int, int] = {}  # by held page, in builds
        self._for_plan: set[int] = set()  # held pages, as in Counters
        self._for_transfer: set[int] = set()
        # A page is looked at again only when the block that held it is not named any more: a step
        # costs what changes, not what is held.
        self._page_held_by: dict[int, int] = {}  # by a named block, one for each page
        self._under_transfer: set[int] = set()  # the pages in it
        self._let_go: set[int] = set()  # those whose block has ceased to be named
        self._looked: dict[int, tuple[tuple[int, list[int]], bool]] = {}  # by id: for a plan?

    @property
    def holding(self) -> int:
        """The number of pages held now."""
        return len(self._since)

    @property
    def held(self) -> Collection[int]:
        """The pages held now."""
        return self._since.keys()

    def plan(self, jobs: Iterable[tuple[int, Transfer]], epoch: int) -> None:
        """Record the transfers of one built step.

        Args:
            jobs: every transfer that the step passes to the workers, by job id.
            epoch: the newest retirement; all up to it precede the step's build.
        """
        for job_id, transfer in jobs:
            if job_id not in self.transfers:
                self.transfers[job_id] = transfer
                self._named.update(transfer.blocks)
        self._planned_epoch = epoch
        self._builds += 1

    def report(self, job_id: int, workers: int) -> None:
        """Record that ``workers`` more workers have completed a transfer."""
        if job_id not in self.transfers:
            return  # it was never planned, or all of it was reported
        self._reports[job_id] += workers
        if self._reports[job_id] < self.workers:
            return
        del self._reports[job_id]
        for block in self.transfers.pop(job_id).blocks:
            if self._named[block] > 1:
                self._named[block] -= 1
                continue
            del self._named[block]
            page = self._page_held_by.pop(block, None)
            if page is not None:
                self._under_transfer.remove(page)
                self._let_go.add(page)

    def split(self, retired: Retired, can_plan: bool) -> tuple[list[int], Retired]:
        """Split retired pages into those that may be unmapped and those still held.

        Args:
            retired: (epoch, page ids) in kvcached's own format.
            can_plan: whether a transfer can still be planned; an engine without requests
                plans none, and need not be stepped.
        """
        released: list[int] = []
        held: Retired = []
        looked = {}
        for entry in retired:
            epoch, pages = entry
            for_plan = can_plan and epoch > self._planned_epoch
            # kvcached makes a new entry when it takes a page out of one.
            _, before = self._looked.get(id(entry), (entry, None))
            if before is not for_plan or self._may_go(pages, for_plan):
                kept = self._look(pages, for_plan, released)
                if len(kept) < len(pages):
                    entry = (epoch, kept)
            if entry[1]:
                held.append(entry)
                looked[id(entry)] = entry, for_plan
        self._looked = looked
        self._let_go.clear()
        if sum(len(pages) for _, pages in held) < len(self._since):  # some were allocated again
            for page in self._since.keys() - {page for _, pages in held for page in pages}:
                self._forget(page)
        return released, held

    def _may_go(self, pages: list[int], for_plan: bool) -> bool:
        return not for_plan and bool(self._let_go) and not self._let_go.isdisjoint(pages)

    def _look(self, pages: list[int], for_plan: bool, released: list[int]) -> list[int]:
        """Return the pages that are held, and add the others to ``released``."""
        if for_plan:
            self._for_plan.update(pages)
            self._hold(pages)
            return pages
        for page in [page for page in pages if page not in self._under_transfer]:
            block = self._named_block(page)
            if block is None:
                released.append(page)
                self._count_release(page)
            else:
                self._page_held_by[block] = page
                self._under_transfer.add(page)
        kept = [page for page in pages if page in self._under_transfer]
        self._for_transfer.update(kept)
        self._hold(kept)
        return kept

    def _hold(self, pages: list[int]) -> None:
        for page in [page for page in pages if page not in self._since]:
            self._since[page] = self._builds
            self.changes += 1

    def _named_block(self, page: int) -> int | None:
        """Return a block of a page that a transfer references; None if there is none."""
        if not self._named:
            return None
        blocks = range(*self.blocks_of_page(page))
        if self._named.keys().isdisjoint(blocks):
            return None
        return next(block for block in blocks if block in self._named)

    def _count_release(self, page: int) -> None:
        self.counters.released += 1
        self.counters.held_for_plan += page in self._for_plan
        self.counters.held_for_transfer += page in self._for_transfer
        held = self._builds - self._since.get(page, self._builds)
        self.counters.longest_hold = max(self.counters.longest_hold, held)
        self._forget(page)

    def _forget(self, page: int) -> None:
        self.changes += self._since.pop(page, None) is not None
        self._for_plan.discard(page)
        self._for_transfer.discard(page)
