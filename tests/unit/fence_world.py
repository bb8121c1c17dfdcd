"""A small world around the real fence: scheduler, workers, copies and pages.

It has vLLM's order of things and nothing of its code: stores are planned while a
step is built, launched by the workers one step later, and read the device's memory
whenever the copy ends. A freed page is unmapped at once, as kvcached does by itself,
or when the fence lets it go. Whatever a copy reads that is not the block it was
planned for is a loss.
"""

import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from kvpatch.patches.fence.fence import Fence, Transfer
from kvpatch.patches.fence.hooks import forget_freed_blocks

PAGES = 8
PAGE = 2  # blocks of a page
SCRATCH, BLANK = "unmapped", "newly mapped"


@dataclass(frozen=True)
class Mode:
    """How an engine runs.

    Attributes:
        asynchronous: one step is scheduled ahead of the one that runs.
        deferred: a finished request's blocks are freed only when its last step ended.
        late_plans: stores of a finished request are planned by the step after.
        workers: processes that each hold a part of every block.
        window: blocks may fall out of a sliding window.
    """

    asynchronous: bool
    deferred: bool
    late_plans: bool
    workers: int
    window: bool


MODES = tuple(
    Mode(asynchronous, deferred, late_plans, workers, window)
    for asynchronous, deferred in ((False, False), (True, True), (True, False))
    for late_plans in (False, True)
    for workers, window in ((1, True), (2, False))
)


@dataclass
class Request:
    """A request; ``group`` has the planner's own list of its blocks, which may be stale."""

    name: int
    blocks: list[int | None] = field(default_factory=list)
    group: Any = field(default_factory=lambda: SimpleNamespace(block_ids=[]))
    version: int = 0
    filled: int = 0
    stored: int = 0
    last_step: int = 0
    state: str = "waiting"  # then loading, running, stopping, finished

    @property
    def known(self):
        """The planner's list; as in vLLM it is extended, cleared, and set to 0 in places."""
        return self.group.block_ids

    def owned(self):
        return [block for block in self.blocks if block is not None]


@dataclass
class Job:
    """A store of blocks, or a load into them, and what the bytes ought to be."""

    request: Request
    blocks: list[int]
    bytes: list[Any]
    load: bool = False


@dataclass
class Step:
    """What the scheduler tells the workers in one step."""

    number: int
    scheduled: list[Request] = field(default_factory=list)
    writes: list[tuple[int, Any]] = field(default_factory=list)
    stores: dict[int, Job] = field(default_factory=dict)
    loads: dict[int, Job] = field(default_factory=dict)
    flush: set[int] = field(default_factory=set)


class Worker:
    """One rank: its memory, the steps it was given, the copies it runs."""

    def __init__(self, world):
        self.world = world
        self.memory = [BLANK] * (PAGES * PAGE)
        self.queue = []
        self.unlaunched = {}
        self.running = {}
        self.ended = []

    def execute(self):
        """Run the oldest step: flush, launch, compute, and keep its stores for later."""
        step = self.queue.pop(0)
        for job_id in step.flush & step.stores.keys():
            self.unlaunched[job_id] = step.stores.pop(job_id)
        self.running |= self.unlaunched | step.loads
        self.unlaunched = {}
        for job_id in step.flush & self.running.keys():
            self.end_copy(job_id)
        for block, data in step.writes:
            if self.world.is_mapped(block):
                self.memory[block] = data
        self.unlaunched = dict(step.stores)

    def execute_through(self, number):
        while self.queue and self.queue[0].number <= number:
            self.execute()

    def end_copy(self, job_id):
        job = self.running.pop(job_id)
        for block, expected in zip(job.blocks, job.bytes, strict=True):
            if job.load:
                self.memory[block] = expected
                if not self.world.is_mapped(block):
                    self.world.lost.append(f"job {job_id} wrote block {block}, unmapped")
            elif self.memory[block] != expected:
                self.world.lost.append(
                    f"job {job_id} read {self.memory[block]} for {expected} in block {block}"
                )
        self.ended.append(job_id)


class World:
    """An engine with a connector on elastic memory.

    Args:
        mode: how it runs.
        fence: the kind of fence that decides when a page is unmapped; None for kvcached's
            own way, at the free.
        forget: whether the planner is told of blocks that were unmapped.
        seed: what the choices follow that no rule of the test makes.
    """

    def __init__(self, mode, fence, forget, seed):
        self.mode, self.fenced, self.forget = mode, fence is not None, forget
        self.random = random.Random(seed)
        self.lost = []
        self.fence = (fence or Fence)(lambda page: (page * PAGE, page * PAGE + PAGE), mode.workers)
        self.workers = [Worker(self) for _ in range(mode.workers)]
        self.requests = []
        self.just_finished = []
        self.deferred = []
        self.jobs = {}
        self.batches = []
        self.tier_full = False
        self.scheduled = self.processed = self.job_count = self.request_count = 0
        self.free = list(range(PAGES * PAGE))
        self.cached = []
        self.mapped = set()
        self.retired = []
        self.epoch = 0
        self.unmapped = 0

    # Pages and blocks

    def is_mapped(self, block):
        return block // PAGE in self.mapped

    def take(self, count):
        """Hand out blocks, old cached ones last; None when there are too few."""
        if len(self.free) < count:
            self.evict(count - len(self.free))
        if len(self.free) < count:
            return None
        taken = [
            self.free.pop(self.random.choice((0, 0, -1)))  # mostly the one freed longest ago
            for _ in range(count)
        ]
        for page in {block // PAGE for block in taken}:
            self.retired = [
                (epoch, left)
                for epoch, pages in self.retired
                if (left := [*filter(page.__ne__, pages)])
            ]
            if page not in self.mapped:
                self.mapped.add(page)
                self.fill(page, BLANK)
        return taken

    def give_back(self, blocks, cache):
        """Free blocks, or leave them in the prefix cache until they are evicted."""
        for block in blocks:
            (self.cached if cache else self.free).append(block)
        self.retire_empty()

    def evict(self, count):
        """Drop cached blocks: for room, for the cap on cached tokens, for a reset."""
        self.free += self.cached[:count]
        del self.cached[:count]
        self.retire_empty()

    def retire_empty(self):
        waiting = {page for _, pages in self.retired for page in pages}
        free = set(self.free)
        pages = [
            page
            for page in sorted(self.mapped - waiting)
            if free.issuperset(range(page * PAGE, page * PAGE + PAGE))
        ]
        if pages and self.fenced:
            self.epoch += 1
            self.retired.append((self.epoch, pages))
        elif pages:
            self.unmap(pages)

    def unmap(self, pages):
        for page in pages:
            self.mapped.remove(page)
            self.unmapped += 1
            self.fill(page, SCRATCH)

    def fill(self, page, data):
        for worker in self.workers:
            worker.memory[page * PAGE : page * PAGE + PAGE] = [data] * PAGE

    def release(self):
        """Ask the fence, as the engine does after every step."""
        if not self.fenced:
            return
        can_plan = bool(self.requests or self.just_finished)
        pages, self.retired = self.fence.split(self.retired, can_plan)
        if pages:
            for worker in self.workers:  # the barrier: an RPC behind every step queued
                while worker.queue:
                    worker.execute()
        if self.forget:
            forget_freed_blocks(self.planner(), self.fence, pages)
        self.unmap(pages)

    def planner(self):
        """The parts of vLLM's planner that the fence touches."""
        return SimpleNamespace(
            _sliding_window_groups=(0,) if self.mode.window else (),
            _req_status={
                request.name: SimpleNamespace(group_states=[request.group])
                for request in self.requests
            },
        )

    # What users and operators do

    def add(self, blocks, from_tier):
        request = Request(self.request_count, [None] * blocks)
        self.request_count += 1
        request.state = "waiting for a load" if from_tier else "waiting"
        self.requests.append(request)

    def stop(self, index):
        """The next token of a running request will be its last."""
        running = [request for request in self.requests if request.state == "running"]
        if running:
            running[index % len(running)].state = "stopping"

    def abort(self, index):
        if self.requests:
            self.end(self.requests[index % len(self.requests)])

    def skip(self, index):
        """A block falls out of a request's sliding window."""
        running = [request for request in self.requests if request.state == "running"]
        if running and self.mode.window:
            request = running[index % len(running)]
            if len(request.owned()) > 1:
                position = next(i for i, block in enumerate(request.blocks) if block is not None)
                block = request.blocks[position]
                request.blocks[position] = None
                assert block is not None
                self.give_back([block], cache=False)

    # One step of the engine

    def step(self):
        """Schedule, and process the oldest step when the queue of batches is full."""
        self.batches.append(self.schedule())
        if len(self.batches) > self.mode.asynchronous:
            self.update(self.batches.pop(0))
        self.release()

    def schedule(self):
        self.scheduled += 1
        step = Step(self.scheduled)
        fresh = set()
        for request in list(self.requests):
            if request.state in ("running", "stopping") and self.random.random() < 0.6:
                self.grow(request, step, fresh)
        for request in list(self.requests):
            if request.state in ("waiting", "waiting for a load"):
                self.admit(request, step, fresh)
                break
        for request in step.scheduled:
            for position in range(request.filled, len(request.blocks)):
                block = request.blocks[position]
                if block is not None:
                    step.writes.append((block, (request.name, position, request.version)))
            request.filled = len(request.blocks)
            request.last_step = step.number
        self.plan(step, fresh)
        for worker in self.workers:
            worker.queue.append(replace(step, stores=dict(step.stores)))
        return step

    def grow(self, request, step, fresh):
        while (taken := self.take(1)) is None:
            victims = [
                other
                for other in self.requests
                if other.state in ("running", "stopping") and not self.in_flight(other)
            ]
            if not victims:
                return
            self.preempt(victims[-1], step)
            if victims[-1] is request:
                return
        request.blocks += taken
        request.known.extend(taken)
        fresh.update(taken)
        step.scheduled.append(request)

    def in_flight(self, request):
        return self.mode.deferred and request.last_step > self.processed

    def preempt(self, victim, step):
        if victim in step.scheduled:
            step.scheduled.remove(victim)
        step.flush |= {job_id for job_id, (job, _) in self.jobs.items() if job.request is victim}
        owned = victim.owned()
        victim.blocks = [None] * max(1, len(victim.blocks) - 1)
        victim.known.clear()
        victim.filled = victim.stored = 0
        victim.version += 1
        victim.state = "waiting"
        self.give_back(owned, cache=self.random.random() < 0.3)

    def admit(self, request, step, fresh):
        if any(job.request is request for job, _ in self.jobs.values()):
            return  # a preempted request waits for its own stores
        taken = self.take(len(request.blocks))
        if taken is None:
            return
        request.blocks = list(taken)
        request.known.extend(taken)
        fresh.update(taken)
        if request.state == "waiting":
            request.state = "running"
            step.scheduled.append(request)
            return
        request.state = "loading"
        request.filled = request.stored = len(taken)
        data = [(request.name, i, request.version) for i in range(len(taken))]
        self.submit(Job(request, list(taken), data, load=True), step.loads)

    def submit(self, job, jobs):
        self.job_count += 1
        jobs[self.job_count] = job
        self.jobs[self.job_count] = (job, 0)
        return self.job_count

    def plan(self, step, fresh):
        """Plan the stores of this step, as the connector's scheduler side does."""
        for request in self.requests:
            for position, known in enumerate(request.known):
                if known in fresh and request.blocks[position] != known:
                    request.known[position] = 0
        step.flush |= {
            job_id
            for job_id, (job, _) in self.jobs.items()
            if fresh.intersection(job.blocks) and not job.load
        }
        late = self.just_finished if self.mode.late_plans else []
        for request in [*step.scheduled, *late]:
            if self.tier_full:
                continue
            upto = request.filled - (request not in late and self.random.random() < 0.5)
            stored, request.stored = request.stored, max(request.stored, upto)
            named = [
                (position, block)
                for position in range(stored, request.stored)
                if (block := request.known[position])
            ]
            if named:
                data = [(request.name, position, request.version) for position, _ in named]
                job_id = self.submit(Job(request, [block for _, block in named], data), step.stores)
                if request in late and fresh.intersection(block for _, block in named):
                    step.flush.add(job_id)
        self.just_finished = []
        handed = [*step.stores.items(), *step.loads.items()]
        self.fence.plan(
            [
                (job_id, Transfer(str(job.request.name), tuple(job.blocks)))
                for job_id, job in handed
            ],
            self.epoch,
        )

    def update(self, step):
        """Take in what the workers report, and free what has finished."""
        for worker in self.workers:
            worker.execute_through(step.number)
            ended, worker.ended = worker.ended, []
            for job_id in ended:
                self.fence.report(job_id, 1)
                job, reports = self.jobs.pop(job_id)
                if reports + 1 < self.mode.workers:
                    self.jobs[job_id] = (job, reports + 1)
                elif job.load:
                    self.loaded(job.request)
        self.processed = step.number
        while self.deferred and self.deferred[0][0] <= self.processed:
            self.give_back(self.deferred.pop(0)[1], cache=self.random.random() < 0.3)
        for request in step.scheduled:
            if request.state == "stopping":
                self.end(request)

    def loaded(self, request):
        if request.state == "loading":
            request.state = "running"
        else:  # aborted meanwhile: its blocks were kept until now
            self.give_back(request.owned(), cache=False)

    def end(self, request):
        self.requests.remove(request)
        was, request.state = request.state, "finished"
        if was == "loading":
            return
        self.just_finished.append(request)
        if self.in_flight(request):
            self.deferred.append((request.last_step, request.owned()))
        else:
            self.give_back(request.owned(), cache=self.random.random() < 0.3)

    # Coming to rest

    def end_copies(self, rank, count):
        worker = self.workers[rank % len(self.workers)]
        for job_id in sorted(worker.running)[:count]:
            worker.end_copy(job_id)

    def awake(self):
        return bool(
            self.requests
            or self.just_finished
            or self.jobs
            or self.batches
            or self.deferred
            or self.fence.holding
        )

    def rest(self):
        """End every request and step until the engine may sleep."""
        for _ in range(100):
            for request in list(self.requests):
                self.end(request)
            self.step()
            for rank in range(self.mode.workers):
                self.end_copies(rank, 100)
            while self.batches:
                self.update(self.batches.pop(0))
            self.release()
            if not self.awake():
                break
        assert not self.awake(), "the engine does not come to rest"
        self.evict(len(self.cached))
        self.release()
