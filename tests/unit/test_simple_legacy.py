"""SimpleCPUOffloadConnector before 0.26, presented in the terms of later releases."""

from types import SimpleNamespace

import pytest
from fakes import module
from test_simple_eviction import Planner, match
from test_simple_eviction import planner as planner_of

from kvpatch.patches.simple_offload import fixes, legacy


class LinkedPlanner(Planner):
    """Lazy mode up to 0.25, which follows links and remembers where it stopped."""

    _cursor = None

    def bind(self):
        self.pool.kv_block_pool = self.pool.blocks
        legacy.around_bind(lambda pool: None, self, (self.pool,), {})

    def _walk(self):
        queue = self.pool.free_block_queue
        node = (self._cursor or queue.fake_free_list_head).next_free_block
        taken = []
        covered = 0
        while (
            node is not None
            and node is not queue.fake_free_list_tail
            and covered < self._target_free
            and len(taken) < self.cpu_block_pool.room
        ):
            self._cursor = node
            bhash = node.block_hash
            if bhash and not node.is_null and not self.cpu_block_pool.get_one_block(bhash):
                taken.append(node.block_id)
            covered += 1
            node = node.next_free_block
        return taken


def planner(cached, **more):
    return planner_of(cached, kind=LinkedPlanner, **more)


def test_the_walk_follows_links_from_the_oldest_block():
    assert planner(cached=8).walk() == [1, 2, 3, 4]
    assert planner(cached=8, free=3).walk() == [1]
    assert planner(cached=8, free=4).walk() == []
    assert planner(cached=2).walk() == [1, 2]


def test_a_raised_target_ends_with_its_step():
    lazy = planner(cached=8)
    assert match(lazy, tokens=200, hit=112) == (None, False)
    assert lazy.walk() == [1, 2, 3, 4, 5, 6, 7]
    assert lazy._target_free == 4
    assert not lazy.order.full
    assert lazy._cursor is None


def test_only_what_the_connector_looked_at_was_offered():
    lazy = planner(cached=4, room=1)
    assert lazy.walk() == [1]
    lazy.copies_end()
    assert lazy.walk() == [2]
    nothing = planner(cached=4, room=0)
    assert nothing.walk() == []
    assert nothing.order.evictable.offered == set()


def test_what_is_above_the_cap_is_offered_first():
    lazy = planner(cached=5, free=50, cap=3)
    lazy.pool.victims = [4, 5]
    assert lazy.walk() == [4, 5]
    lazy.copies_end()
    lazy.walk()
    assert set(lazy.pool._evictable_blocks) == {1, 2, 3}


def test_the_pool_has_its_blocks_by_vllms_name_in_eager_mode_too():
    pool = SimpleNamespace(kv_block_pool=[object()])
    eager = SimpleNamespace(_lazy_mode=False, _gpu_block_pool=None)

    def bind(gpu_block_pool):
        eager._gpu_block_pool = gpu_block_pool

    legacy.around_bind(bind, eager, (pool,), {})
    assert pool.blocks is pool.kv_block_pool
    assert not hasattr(pool, "free_block_queue")


@pytest.mark.parametrize(
    ("vllm_asks", "stores", "loads", "asked"),
    [
        (False, False, {}, False),
        (True, False, {}, True),
        (False, True, {}, True),
        (False, False, {"request": 1}, True),
    ],
)
def test_an_engine_steps_while_a_copy_is_under_way(vllm_asks, stores, loads, asked):
    waiting = SimpleNamespace(has_pending_stores=lambda: stores, _reqs_to_load=loads)
    scheduler = SimpleNamespace(connector=SimpleNamespace(scheduler_manager=waiting))
    assert legacy.around_has_requests(lambda: vllm_asks, scheduler, (), {}) is asked
    scheduler.connector = SimpleNamespace(_connectors=[SimpleNamespace(), scheduler.connector])
    assert legacy.around_has_requests(lambda: vllm_asks, scheduler, (), {}) is asked


@pytest.mark.parametrize(
    "connector", [None, SimpleNamespace(), SimpleNamespace(scheduler_manager=None)]
)
def test_an_engine_without_this_connector_steps_as_it_did(connector):
    scheduler = SimpleNamespace(connector=connector)
    assert legacy.around_has_requests(lambda: True, scheduler, (), {}) is True
    assert legacy.around_has_requests(lambda: False, scheduler, (), {}) is False


class Backend:
    """vLLM's ``DmaCopyBackend`` of 0.22, as far as it is used; it notes what happens."""

    def __init__(self):
        self.done = []

    def init(self, gpu, cpu, device, load_stream, store_stream):
        self._store_params = SimpleNamespace(attrs=SimpleNamespace(srcAccessOrder=3))
        self._load_params = SimpleNamespace(attrs=SimpleNamespace(srcAccessOrder=3))
        self._load_stream, self._store_stream = load_stream, store_stream

    def launch_copy(self, src_blocks, dst_blocks, is_store, event_idx, events_list):
        self.done.append((src_blocks, dst_blocks, is_store, event_idx, events_list))


@pytest.fixture
def computing(monkeypatch):
    """The worker's module, whose torch has a stream that computes."""
    torch = SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda: "compute"))
    module(monkeypatch, "vllm.v1.simple_kv_offload.worker", torch=torch)


def test_copies_wait_for_the_computation(computing):
    backend = legacy.ordered_backend(Backend)()
    load, store = (
        SimpleNamespace(wait_stream=lambda other, name=name: backend.done.append((name, other)))
        for name in ("load", "store")
    )
    backend.init({}, {}, "device", load, store)
    assert backend._store_params.attrs.srcAccessOrder == 1
    assert backend._load_params.attrs.srcAccessOrder == 3
    events = []
    backend.launch_copy([1], [2], is_store=False, event_idx=0, events_list=events)
    backend.launch_copy([3], [4], is_store=True, event_idx=5, events_list=events)
    assert backend.done == [
        ("load", "compute"),
        ([1], [2], False, 0, events),
        ("store", "compute"),
        ([3], [4], True, 5, events),
    ]


@pytest.mark.parametrize(
    ("args", "kwargs"), [(([1], [2], False, 0), {}), (([1], [2]), {"is_store": False})]
)
def test_a_load_of_0_24_waits_for_the_computation(computing, args, kwargs):
    done = []
    backend = SimpleNamespace(_load_stream=SimpleNamespace(wait_stream=done.append))
    legacy.around_load(lambda *args, **kwargs: done.append("queued"), backend, args, kwargs)
    assert done == ["compute", "queued"]


def test_a_store_of_0_24_waits_for_its_event_alone():
    done = []
    legacy.around_load(lambda *args: done.append("queued"), object(), ([1], [2], True, 0), {})
    assert done == ["queued"]


def test_a_request_that_computes_every_token_is_not_looked_up():
    request = SimpleNamespace(skip_reading_prefix_cache=True)
    assert fixes.around_match(None, object(), (request, 0), {}) == (0, False)
    request.skip_reading_prefix_cache = False
    found = fixes.around_match(lambda request, computed: (32, True), object(), (request, 0), {})
    assert found == (32, True)


def test_what_is_being_stored_is_not_stored_again():
    stored = SimpleNamespace(get_one_block=lambda key: "row" if key == "done" else None, pop=max)
    pool = SimpleNamespace(
        cached_block_hash_to_block=stored,
        blocks=[SimpleNamespace(block_hash=name) for name in "abcd"],
    )
    transfers = {n: SimpleNamespace(cpu_block_ids=ids) for n, ids in enumerate(([0, 1], [3]))}
    eager = SimpleNamespace(cpu_block_pool=pool, _store_event_to_blocks=transfers)

    def prepare(scheduler_output):
        known = pool.cached_block_hash_to_block
        assert known.pop is max
        return [key for key in (*"abcd", "done") if known.get_one_block(key) is None]

    assert legacy.around_eager_stores(prepare, eager, ({},), {}) == ["c"]
    assert pool.cached_block_hash_to_block is stored


class WithPins:
    """A connector's scheduler whose tier is emptied if nothing in it is pinned."""

    def __init__(self):
        self._pending_cpu_hits = {"waits": ("blocks", 16), "too": ("others", 32)}
        self.freed = []

    def _free_pending_cpu_hit(self, hit):
        assert hit in self._pending_cpu_hits.values()
        self.freed.append(hit)

    def reset(self):
        return len(self.freed) == 2 and not self._pending_cpu_hits


def test_a_reset_releases_the_hits_of_requests_that_wait():
    scheduler = WithPins()
    assert fixes.before_reset(scheduler.reset, scheduler, (), {})
    assert scheduler.freed == [("blocks", 16), ("others", 32)]
