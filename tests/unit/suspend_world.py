"""A small world around a real suspension: an engine, its requests, its blocks and its pages.

It has vLLM's order of things and none of its code. A step builds stores and reports those of
earlier steps; a batch that is under way writes its blocks; pages go back when their blocks are
free and the fence lets them.
"""

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch import state
from kvpatch.patches.suspend import giving, hooks
from kvpatch.patches.suspend.giving import Giving
from kvpatch.patches.suspend.hold import Hold
from kvpatch.patches.suspend.spill import Spill, Tier
from kvpatch.patches.suspend.suspension import Phase, Suspension
from kvpatch.upstream import kvcached_api

PAGE = 1 << 20
MOST = 8  # pages that the engine started with
BLOCKS = 4  # of a page


class Pause(IntEnum):
    """vLLM's ``PauseState``."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class Status(SimpleNamespace):
    """A status of a request, by its name."""


@dataclass
class Request:
    """A request and the blocks it holds."""

    name: str
    blocks: list[int] = field(default_factory=list)
    status: Any = field(default_factory=lambda: Status(name="RUNNING"))
    num_computed_tokens: int = 0
    left: int = 3  # steps until it has finished


class Store(Tier):
    """A CPU tier whose copies take some steps."""

    def __init__(self, room, steps=2):
        self.blocks = OrderedDict()
        self.flying = []
        self.room, self.steps = room, steps
        self.stuck = False

    def why_not(self):
        return ""

    def holds(self, key):
        return key in self.blocks

    def capacity(self):
        return self.room

    def keep(self, keys):
        for key in reversed(keys):
            self.blocks.move_to_end(key)

    def have(self, *blocks):
        """Hold blocks of earlier requests."""
        self.blocks |= {f"old{one}".encode(): f"bytes of old{one}" for one in blocks}

    def busy(self):
        return bool(self.flying)

    def awaits(self, keys):
        return keys & {key for _, key, _ in self.flying}

    def step(self, now):
        """Complete what has taken long enough."""
        for begun, key, content in list(self.flying):
            if now >= begun + self.steps and not self.stuck:
                self.flying.remove((begun, key, content))
                while len(self.blocks) >= self.room:
                    self.blocks.popitem(last=False)
                self.blocks[key] = content


class Pool:
    """kvcached's pool of blocks: who is cached, who is used."""

    def __init__(self):
        self.max_cached_blocks = 500
        self._cached_blocks = {}
        self._block_id_to_key = {}
        self._evictable_blocks = OrderedDict()
        self.content = {}

    def retire(self):
        """Take note of the pages that are empty now."""

    def cache(self, block, key, used=False):
        self._cached_blocks.setdefault(key, {})[block] = object()
        self._block_id_to_key[block] = key
        self.content[block] = f"bytes of {key.decode()}"
        if not used:
            self._evictable_blocks[block] = object()

    def used(self):
        return set(self.content)

    def evict_blocks(self, blocks):
        for block in blocks:
            key = self._block_id_to_key.pop(block)
            del self._cached_blocks[key][block]
            if not self._cached_blocks[key]:
                del self._cached_blocks[key]
            del self._evictable_blocks[block]  # nobody evicts what a request uses
            del self.content[block]
        self.retire()


class Manager:
    """kvcached's manager of pages, with its pool in /dev/shm."""

    mem_size, num_layers, num_kv_buffers, page_size = MOST * PAGE, 1, 1, PAGE
    block_mem_size = PAGE // BLOCKS

    def __init__(self, pool):
        self.pool = pool
        pool.kv_cache_manager = self
        self._lock = nullcontext()
        self.in_shrink = False
        self.trims = 0
        self.mapping = 0  # times that a limit is not lowered because pages are being mapped
        self.limit = self.reported = MOST * PAGE  # in /dev/shm; by kvcached's thread
        self.total = MOST
        self.ahead = 2
        self._retired_pages = []  # with their epochs
        self.page_allocator = self

    def in_use(self):
        """Page 0 has the null block."""
        return {0} | {block // BLOCKS for block in self.pool.used()}

    def get_page_state(self):
        mapped = len(self.in_use() | kvcached_api.retired(self))
        return {"inuse_pages": mapped, "reserved_pages": self.ahead, "total_pages": self.total}

    def get_resize_target(self):
        return self.reported

    def trim(self):
        self.ahead = 0
        self.trims += 1

    def group_indices_by_page(self, blocks, size):
        pages = {}
        for block in blocks:
            pages.setdefault(block // BLOCKS, []).append(block)
        return pages

    def get_page_occupancy(self, pages):
        return {page: sum(b // BLOCKS == page for b in self.pool.used()) for page in pages}

    def resize(self, size):
        """As kvpatch wraps it."""
        return giving.around_resize(self._resize, self, (size,), {})

    def _resize(self, size):
        if self.mapping:
            self.mapping -= 1
            return False
        self.in_shrink = size // PAGE < self.get_page_state()["inuse_pages"]
        if not self.in_shrink:
            self.total = size // PAGE
        return not self.in_shrink


class Scheduler:
    """vLLM's: what runs, what waits, and whether it may."""

    def __init__(self):
        self.requests = {}
        self.running = []
        self.waiting = []
        self.pause_state = Pause.UNPAUSED
        self.connector = SimpleNamespace()
        self.reset_preempted_req_ids = set()

    def set_pause_state(self, wanted):
        def wrapped(state):
            self.pause_state = Pause(state)

        hooks.around_pause_state(wrapped, self, (wanted,), {})

    def has_unfinished_requests(self):
        return bool(self.running or self.waiting)

    def get_request_counts(self):
        return len(self.running), len(self.waiting)

    def has_requests(self):
        if self.pause_state is Pause.PAUSED_ALL:
            there = False
        elif self.pause_state is Pause.PAUSED_NEW:
            there = bool(self.running)
        else:
            there = bool(self.running or self.waiting)
        held = state.find(self, Hold)
        return there or (held is not None and bool(held.stepped_for))


class Shares:
    """In the place of the time for a step: so many pages and stores in each."""

    def __init__(self, pages=1000, stores=1000):
        self.pages, self.stores = pages, stores
        self.ran = []
        self._left = 0

    def begin(self, runs):
        self.ran.append(runs)
        self._left = self.pages

    @property
    def left(self):
        self._left -= 1
        return self._left >= 0

    def end(self):
        pass


class World:
    """An engine with a suspension.

    Args:
        room: blocks of its CPU tier.
        ahead: batches that are under way when a step begins, as with asynchronous scheduling.
        gives: it gives pages back for a lower limit and when it is idle.
    """

    def __init__(self, room=100, ahead=0, gives=False):
        self.scheduler = Scheduler()
        self.vllm_config = None  # of which nothing is asked
        self.pool = Pool()
        self.manager = Manager(self.pool)
        self.tier = Store(room)
        self.batch_queue = [None] * ahead
        self.spill = Spill(self.tier, self.pool)
        self.steps = 0
        self.finished = []
        self.lag = 3  # steps between two looks of kvcached's thread at the limit
        self.fence = 2  # steps until pages are let go; 0 for at once
        self._retired = []
        self._in_use = set()
        self.pool.retire = self._retire
        self.suspension = Suspension(self, self.spill)
        if gives:
            self.giving = Giving(self, self.spill, self._may_give)
            self.giving._share = Shares()
            state.attach(self.manager, self.giving)

    def _may_give(self):
        return self.suspension.phase is Phase.RUNS

    def reset_prefix_cache(self, reset_running_requests=False):
        assert reset_running_requests
        assert not self.batch_queue, "blocks are freed that a batch writes"
        for request in reversed(self.scheduler.running):
            request.status = Status(name="PREEMPTED")
            request.num_computed_tokens = 0
            self.scheduler.waiting.insert(0, request)
            self.scheduler.reset_preempted_req_ids.add(request.name)
        self.scheduler.running.clear()
        flying = {key for _, key, _ in self.tier.flying}
        assert not flying, "blocks are freed that are being copied"
        before = self.manager.in_use()
        self.pool.__init__()
        for request in self.scheduler.requests.values():
            request.blocks = []
        gone = before - self.manager.in_use() if self.fence else set()
        self.manager._retired_pages += [(0, [page]) for page in sorted(gone)]
        self._retired += [(self.steps, page) for page in gone]
        return True

    def add(self, name, *blocks):
        """A request that arrives; with blocks it runs."""
        request = Request(name, list(blocks))
        self.scheduler.requests[name] = request
        (self.scheduler.running if blocks else self.scheduler.waiting).append(request)
        if not blocks:
            request.status = Status(name="WAITING")
        for block in blocks:
            self.pool.cache(block, f"{name}{block}".encode(), used=True)
        return request

    def step(self):
        """One turn of vLLM's loop; False if there was nothing to do."""
        if not (self.batch_queue or self.scheduler.has_requests()):
            return False
        self.steps += 1
        if self.batch_queue:
            self.batch_queue.pop()
        if self.scheduler.pause_state is Pause.UNPAUSED:
            self._admit()
        if self.scheduler.pause_state is not Pause.PAUSED_ALL:
            self._run()
        self.scheduler.reset_preempted_req_ids = set()
        self.tier.step(self.steps)
        self._plan()
        self._retire()
        self._release()
        if self.lag and self.steps % self.lag == 0:
            self.manager.reported = self.manager.limit
        if (other := state.find(self.manager, Giving)) is not None:
            other.advance()
        self.suspension.advance()
        return True

    def _admit(self):
        while self.scheduler.waiting:
            # An allocation applies the limit that kvcached's thread reports.
            assert self.manager.reported == self.manager.limit, "an old limit is applied"
            request = self.scheduler.waiting.pop(0)
            told = request.name in self.scheduler.reset_preempted_req_ids
            assert not told, "loaded in the step that says it was preempted"
            request.status = Status(name="RUNNING")
            self.scheduler.running.append(request)

    def _run(self):
        for request in list(self.scheduler.running):
            request.left -= 1
            if request.left <= 0:
                self.scheduler.running.remove(request)
                del self.scheduler.requests[request.name]
                self.finished.append(request.name)
                for block in reversed(request.blocks):
                    self.pool._evictable_blocks[block] = object()

    def _plan(self):
        blocks = self.spill.next()
        for one in blocks:
            (block,) = one.blocks
            self.tier.flying.append((self.steps, one.key, self.pool.content[block.block]))
        self.spill.planned([one.key for one in blocks])

    def _retire(self):
        """Pages whose last block was evicted wait for the fence."""
        now = self.manager.in_use()
        for page in self._in_use - now - kvcached_api.retired(self.manager):
            self.manager._retired_pages.append((0, [page]))
            self._retired.append((self.steps, page))
        self._in_use = now

    def _release(self):
        for when, page in list(self._retired):
            if self.steps >= when + self.fence:
                self._retired.remove((when, page))
                self.manager._retired_pages.remove((0, [page]))

    def kept(self):
        """The keys of blocks on the device or in the tier."""
        return {self.pool._block_id_to_key[one] for one in self.pool.used()} | set(self.tier.blocks)

    def until_idle(self):
        """Step as long as there is something to do."""
        for _ in range(200):
            if not self.step():
                return
        raise AssertionError("the engine does not come to rest")

    def check(self):
        """Whatever the tier holds is what the block had."""
        for key, content in self.tier.blocks.items():
            assert content == f"bytes of {key.decode()}"


@pytest.fixture
def worlds(monkeypatch):
    """Make worlds, whose kvcached is their own."""

    def write(manager, size):
        manager.limit = size

    monkeypatch.setattr(kvcached_api, "manager_of", lambda engine: engine.manager)
    monkeypatch.setattr(kvcached_api, "pool_of", lambda engine: engine.pool)
    monkeypatch.setattr(kvcached_api, "limit", lambda manager: manager.limit)
    monkeypatch.setattr(kvcached_api, "limit_in_pool", lambda manager: manager.limit)
    monkeypatch.setattr(kvcached_api, "write_limit", write)

    return World


def filled(worlds, **options):
    """An engine with pages 1 to 6 full of blocks of earlier requests."""
    world = worlds(**options)
    for block in range(4, 28):
        world.pool.cache(block, f"old{block}".encode())
    world._in_use = world.manager.in_use()
    return world
