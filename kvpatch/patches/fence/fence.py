"""The fence: which retired pages may be unmapped now. Pure: no vLLM and no kvcached.

kvcached unmaps a page when its last block is freed. vLLM's OffloadingConnector
copies blocks after that: it launches a store one step after it planned it, and
plans a request's last stores after the request's blocks were freed. The copy would
read a scratch page, and be served later as this prompt's KV.

So a freed page waits on kvcached's own list of retired pages, where its blocks can
be allocated again at once, until

    planned     the connector has built one step's transfers since the free, after
                which no transfer that names the page's blocks can be planned; and
    named       no transfer that names one of its blocks is queued or in flight.

A transfer counts from the moment the scheduler hands it to the workers until every
worker has reported it; the connector's own record of it is not used, because
resetting its cache forgets transfers that are in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Retired = list[tuple[int, list[int]]]


@dataclass(frozen=True)
class Transfer:
    """One transfer job: who asked for it and which blocks of the device it names."""

    request: str
    blocks: tuple[int, ...]


@dataclass
class Counters:
    """What the fence did so far.

    Attributes:
        released: pages given back through the fence.
        held_for_plan: pages that had to wait for the next step's transfers to be built.
        held_for_transfer: pages that had to wait for a transfer to end.
        longest_hold: most steps that a page waited.
    """

    released: int = 0
    held_for_plan: int = 0
    held_for_transfer: int = 0
    longest_hold: int = 0


@dataclass
class _Hold:
    since: int
    rules: set[str] = field(default_factory=set)


class Fence:
    """Decides which retired pages may be unmapped now.

    Args:
        blocks_of_page: the block ids ``[start, end)`` of a page.
        workers: reports that end a transfer, one from each worker.
        pinned: the connector keeps a reference to every block of a transfer until it has
            ended. A freed page is then never named, and only waits for the computation.
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
        """Pages that are held back now."""
        return len(self._holds)

    def plan(self, jobs: Iterable[tuple[int, Transfer]], epoch: int) -> None:
        """Take note of one built step.

        Args:
            jobs: every transfer the step hands to the workers, by job id.
            epoch: the newest retirement; all up to it came before the step was built.
        """
        for job_id, transfer in jobs:
            if job_id not in self.transfers:
                self.transfers[job_id] = transfer
                self._named.update(transfer.blocks)
        self._planned_epoch = epoch
        self._builds += 1

    def report(self, job_id: int, workers: int) -> None:
        """Take note that ``workers`` more workers have ended a transfer."""
        self._reports[job_id] += workers
        if self._reports[job_id] < self.workers:
            return
        del self._reports[job_id]
        transfer = self.transfers.pop(job_id, None)
        if transfer is not None:
            for block in transfer.blocks:
                if self._named[block] > 1:
                    self._named[block] -= 1
                else:
                    del self._named[block]

    def split(self, retired: Retired, can_plan: bool) -> tuple[list[int], Retired]:
        """Part retired pages into those that may be unmapped and those held back.

        Args:
            retired: (epoch, page ids) in kvcached's own form.
            can_plan: whether anything can still plan a transfer at all; an engine
                without requests cannot, and need not be stepped to find out.
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
