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
    """The fence's counts so far.

    Attributes:
        released: pages released through the fence.
        held_for_plan: pages held until the next step's transfers were built.
        held_for_transfer: pages held until a transfer completed.
        longest_hold: most steps that a page was held.
    """

    released: int = 0
    held_for_plan: int = 0
    held_for_transfer: int = 0
    longest_hold: int = 0


class _Hold:
    def __init__(self, since: int) -> None:
        self.since = since
        self.rules: set[str] = set()


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
        self._holds: dict[int, _Hold] = {}

    @property
    def holding(self) -> int:
        """The number of pages held now."""
        return len(self._holds)

    @property
    def held(self) -> Collection[int]:
        """The pages held now."""
        return self._holds.keys()

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
            else:
                del self._named[block]

    def split(self, retired: Retired, can_plan: bool) -> tuple[list[int], Retired]:
        """Split retired pages into those that may be unmapped and those still held.

        Args:
            retired: (epoch, page ids) in kvcached's own format.
            can_plan: whether a transfer can still be planned; an engine without requests
                plans none, and need not be stepped.
        """
        released: list[int] = []
        held: Retired = []
        holds: dict[int, _Hold] = {}
        for epoch, pages in retired:
            kept = []
            for page in pages:
                rule = self._rule(epoch, page, can_plan)
                hold = self._holds.get(page) or _Hold(self._builds)
                if rule is None:
                    released.append(page)
                    self._count_release(hold)
                else:
                    hold.rules.add(rule)
                    holds[page] = hold
                    kept.append(page)
            if kept:
                held.append((epoch, kept))
        self._holds = holds
        return released, held

    def _rule(self, epoch: int, page: int, can_plan: bool) -> str | None:
        if can_plan and epoch > self._planned_epoch:
            return "plan"
        if self._named:
            start, end = self.blocks_of_page(page)
            if not self._named.keys().isdisjoint(range(start, end)):
                return "transfer"
        return None

    def _count_release(self, hold: _Hold) -> None:
        self.counters.released += 1
        self.counters.held_for_plan += "plan" in hold.rules
        self.counters.held_for_transfer += "transfer" in hold.rules
        self.counters.longest_hold = max(self.counters.longest_hold, self._builds - hold.since)
