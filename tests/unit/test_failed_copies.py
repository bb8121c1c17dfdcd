"""Copies that fail: what is stored, what is loaded, and when the engine ends."""

import itertools
import queue
import threading
from types import SimpleNamespace

import pytest
from fakes import module, raising

from kvpatch import patch, state
from kvpatch.patches.debug.audit import Violation
from kvpatch.patches.offloading import FEATURE as OFFLOADING
from kvpatch.patches.offloading.failures import REMEDY, around_transfers
from kvpatch.patches.simple_offload import FEATURE as SIMPLE
from kvpatch.patches.simple_offload import failures, lifetime
from kvpatch.patches.simple_offload.failures import Failure, NotStored
from kvpatch.refusal import Halted, Refusal


class Event:
    """A point of a stream that was reached, or all of a stream; it may be beyond use."""

    def __init__(self, error=None):
        self.error = error

    def query(self):
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self):
        self.query()


class Backend:
    """vLLM's ``DmaCopyBackend``: copies of whole lists of blocks, which fail as asked.

    Args:
        fails: called with the source's blocks, in the place of the copy.
        more: what a copy in the queue has besides, from 0.24 on.
        device: called when the thread begins.
    """

    def __init__(self, fails, more=(), device=None):
        self._queue = queue.SimpleQueue()
        self.streams = {True: Event(), False: Event()}
        self.more = more
        self._fails, self._device = fails, device or (lambda: None)

    def start(self):
        self._thread = threading.Thread(
            target=self._copy_loop,
            args=(self._queue, (self._device, self._fails), *map(self.streams.get, (False, True))),
            daemon=True,
        )
        self._thread.start()

    def launch_copy(self, src, dst, is_store, event_idx, events):
        self._queue.put((src, dst, "parameters", is_store, event_idx, events, *self.more))

    def shutdown(self):
        self._queue.put(None)
        self._thread.join()

    @staticmethod
    def _copy_loop(q, device, load_stream, store_stream):
        set_device, copy_blocks = device
        set_device()
        while True:
            item = q.get()
            if item is None:
                return
            src, _, _, _, event_idx, events, *_ = item
            copy_blocks(src)
            events.append((event_idx, Event()))


class Worker:
    """vLLM's ``SimpleCPUOffloadWorker``, as far as it ends copies."""

    def __init__(self, backend, groups=1):
        self._backend = backend
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[object()] * groups)
        self._load_events = []
        self._store_events = []
        self._hwm = {True: -1, False: -1}
        self._completed_store_events = {}

    def events(self, is_store):
        return self._store_events if is_store else self._load_events

    def _poll_stream_events(self, is_store):
        events = self.events(is_store)
        while events and events[0][1].query():
            self._hwm[is_store], _ = events.pop(0)
        return self._hwm[is_store]

    def _flush_and_sync_all(self):
        for is_store in (False, True):
            for number, event in self.events(is_store):
                event.synchronize()
                self._hwm[is_store] = number
            self.events(is_store).clear()

    def build_connector_worker_meta(self):
        if not self._completed_store_events:
            return None
        meta = SimpleNamespace(completed_store_events=self._completed_store_events)
        self._completed_store_events = {}
        return meta


class Connector:
    """vLLM's ``SimpleCPUOffloadConnector``, which inherits what it says of failed loads."""

    worker_handler = None

    def get_block_ids_with_load_errors(self):
        return set()


class Block(SimpleNamespace):
    """A block of a pool."""

    def reset_hash(self):
        self.block_hash = None


class Pool:
    """A block pool: the hashes that it offers, and what was freed, in order."""

    def __init__(self, count):
        self.blocks = [Block(block_id=one, block_hash=f"hash {one}") for one in range(count)]
        self.offered = []
        self.freed = []

    def free_blocks(self, blocks):
        self.freed += [block.block_id for block in blocks]


class Scheduler:
    """vLLM's ``SimpleCPUOffloadScheduler``, as far as it ends stores."""

    def __init__(self, ranks=1):
        self._expected_worker_count = ranks
        self._store_event_pending_counts = {}
        self._store_event_to_blocks = {}
        self.cpu_block_pool, self._gpu_block_pool = Pool(16), Pool(16)

    def plan(self, event, device, rows):
        self._store_event_to_blocks[event] = SimpleNamespace(
            gpu_block_ids=device, cpu_block_ids=rows
        )

    def update_connector_output(self, connector_output):
        meta = connector_output.kv_connector_worker_meta
        if meta is None or not hasattr(meta, "completed_store_events"):
            return
        for event_idx, count in meta.completed_store_events.items():
            total = self._store_event_pending_counts.get(event_idx, 0) + count
            if total >= self._expected_worker_count:
                self._store_event_pending_counts.pop(event_idx, None)
                self._process_store_event(event_idx)
            else:
                self._store_event_pending_counts[event_idx] = total

    def _process_store_event(self, event_idx):
        transfer = self._store_event_to_blocks.pop(event_idx, None)
        if transfer is not None:
            self._process_store_completion(transfer.gpu_block_ids, transfer.cpu_block_ids)

    def _process_store_completion(self, gpu_block_ids, cpu_block_ids):
        blocks = [self.cpu_block_pool.blocks[row] for row in cpu_block_ids]
        self.cpu_block_pool.offered += [block.block_hash for block in blocks]
        self.cpu_block_pool.free_blocks(blocks)
        self._gpu_block_pool.free_blocks(
            self._gpu_block_pool.blocks[block] for block in gpu_block_ids
        )

    def hear(self, *metas):
        for meta in metas:
            self.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta))


CLASSES = {
    "DmaCopyBackend": Backend,
    "SimpleCPUOffloadWorker": Worker,
    "SimpleCPUOffloadConnector": Connector,
    "SimpleCPUOffloadScheduler": Scheduler,
}
ROWS = [row for row in SIMPLE.patches if ".failures:" in row.wrapper]


@pytest.fixture
def applied(monkeypatch):
    """The classes above with the rows of failed copies; by name, for one row without."""
    made = []

    def apply(but=""):
        for row in ROWS:
            name, _, attribute = row.target.partition(":")[2].partition(".")
            module(monkeypatch, f"of_{name}", **{name: CLASSES[name]})
            if row.id != but:
                made.append(patch.apply(row._replace(target=f"of_{name}:{name}.{attribute}")))

    yield apply
    for one in reversed(made):
        assert one.revert()


@pytest.fixture
def rows(applied):
    """All of them."""
    applied()


def failing(*sources):
    def copy_blocks(src):
        if src in sources:
            raise RuntimeError("batch memcpy failed: err=1 failIdx=0")

    return copy_blocks


STORE, LOAD = True, False


def copied(fails, *copies, **given):
    """A worker whose backend has made, or failed to make, copies of blocks to blocks.

    Their events are numbered in each direction. ``given`` is of the backend, and ``groups``.
    """
    groups = given.pop("groups", 1)
    backend = Backend(fails, **given)
    worker = Worker(backend, groups)
    backend.start()
    numbers = {STORE: itertools.count(), LOAD: itertools.count()}
    for is_store, source, destination in copies:
        number = next(numbers[is_store])
        backend.launch_copy(source, destination, is_store, number, worker.events(is_store))
    backend.shutdown()
    return worker


MORE = pytest.mark.parametrize("more", [(), ("event",)], ids=["up to 0.23", "from 0.24 on"])


@MORE
def test_the_copies_behind_one_that_failed_are_made(rows, warned, more):
    """Without the row the thread ends, and no copy after it is ever made."""
    stores = ((STORE, [block], [9]) for block in range(3))
    worker = copied(failing([1]), *stores, (LOAD, [3], [4]), more=more)
    assert worker._poll_stream_events(True) == 2
    assert worker._poll_stream_events(is_store=False) == 0
    assert warned.messages == [
        "a store of 1 blocks failed with RuntimeError: batch memcpy failed: err=1 failIdx=0; the "
        "CPU tier does not offer them"
    ]


def test_without_the_row_the_thread_is_gone(applied, monkeypatch):
    applied(but="simple_offload.copy_loop")
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    worker = copied(failing([1]), (LOAD, [1], [9]), (LOAD, [2], [9]))
    assert worker._poll_stream_events(False) == -1
    assert worker._load_events == []


def stored(worker, *events):
    """What a worker reports of stores whose events it has seen."""
    worker._poll_stream_events(True)
    worker._completed_store_events |= dict.fromkeys(events, 1)
    return worker.build_connector_worker_meta()


def two_stores(fails):
    return copied(fails, (STORE, [1, 2], [5, 6]), (STORE, [3], [7]))


def planned(ranks=1):
    scheduler = Scheduler(ranks)
    scheduler.plan(0, [1, 2], [5, 6])
    scheduler.plan(1, [3], [7])
    return scheduler


def test_the_tier_does_not_offer_what_was_not_stored(rows):
    scheduler = planned()
    scheduler.hear(stored(two_stores(failing([1, 2])), 0, 1))
    tier = scheduler.cpu_block_pool
    assert tier.offered == ["hash 7"]
    # They are free again, on both sides, and no hash stays with bytes that are not its own.
    assert sorted(tier.freed) == [5, 6, 7]
    assert [tier.blocks[row].block_hash for row in (5, 6, 7)] == [None, None, "hash 7"]
    assert sorted(scheduler._gpu_block_pool.freed) == [1, 2, 3]
    assert scheduler._store_event_to_blocks == {}
    assert state.of(scheduler, NotStored).rows == []


@pytest.mark.parametrize("row", ["simple_offload.failed_stores", "simple_offload.not_stored"])
def test_without_a_row_it_would(applied, row):
    applied(but=row)
    scheduler = planned()
    scheduler.hear(stored(two_stores(failing([1, 2])), 0, 1))
    assert sorted(scheduler.cpu_block_pool.offered) == ["hash 5", "hash 6", "hash 7"]


def test_without_the_schedulers_row_its_blocks_are_never_free(applied):
    applied(but="simple_offload.reports")
    scheduler = planned()
    scheduler.hear(stored(two_stores(failing([1, 2])), 0, 1))
    assert 0 in scheduler._store_event_to_blocks


@pytest.mark.parametrize("first", [0, 1])
def test_a_store_that_failed_on_one_rank_is_not_offered_by_all(rows, first):
    """Reports come in different steps, or added up in one."""
    broken, whole = two_stores(failing([3])), two_stores(failing())
    metas = [stored(broken, 0, 1), stored(whole, 0, 1)]
    scheduler = planned(ranks=2)
    scheduler.hear(metas[first])
    assert scheduler.cpu_block_pool.freed == []
    scheduler.hear(metas[1 - first])
    assert scheduler.cpu_block_pool.offered == ["hash 5", "hash 6"]
    assert sorted(scheduler.cpu_block_pool.freed) == [5, 6, 7]


def test_reports_of_ranks_are_added_up_in_one_step(rows):
    both = dict(stored(two_stores(failing([3])), 0, 1).completed_store_events)
    for number, count in stored(two_stores(failing()), 0, 1).completed_store_events.items():
        both[number] = both.get(number, 0) + count  # as vLLM's metadata aggregates
    scheduler = planned(ranks=2)
    scheduler.hear(SimpleNamespace(completed_store_events=both))
    assert scheduler.cpu_block_pool.offered == ["hash 5", "hash 6"]
    assert scheduler._store_event_pending_counts == {}


def test_a_failed_store_of_before_a_reset_is_nothing_to_the_blocks_of_a_later_one(rows):
    scheduler = planned(ranks=2)
    scheduler.hear(stored(two_stores(failing([1, 2])), 0))
    scheduler._store_event_to_blocks.clear()
    scheduler.hear(stored(two_stores(failing()), 0))
    scheduler.plan(2, [1, 2], [5, 6])
    scheduler.hear(SimpleNamespace(completed_store_events={2: 2}))
    assert scheduler.cpu_block_pool.offered == ["hash 5", "hash 6"]
    scheduler.hear(SimpleNamespace(completed_store_events={~0: 1}))  # of a reset too


def test_reports_that_are_not_the_connectors_are_left_alone(rows):
    scheduler = planned()
    scheduler.hear(None, SimpleNamespace(of="another connector"))
    assert set(scheduler._store_event_to_blocks) == {0, 1}


def one_load(fails, groups=1, events=1):
    loads = ((LOAD, [event], [10 + event, 20 + event]) for event in range(events))
    return copied(fails, *loads, groups=groups)


@pytest.mark.parametrize("flushed", [False, True])
def test_vllm_hears_of_the_blocks_of_a_failed_load_in_the_step_that_ends_it(rows, warned, flushed):
    """It fails the requests, or computes the blocks again."""
    worker = one_load(failing([0]), events=2)
    connector = Connector()
    connector.worker_handler = worker
    assert connector.get_block_ids_with_load_errors() == set()
    if flushed:
        worker._flush_and_sync_all()
    assert worker._poll_stream_events(False) == 1  # both requests go on
    assert connector.get_block_ids_with_load_errors() == {10, 20}
    assert connector.get_block_ids_with_load_errors() == set()
    assert warned.messages == [
        "a load of 2 blocks failed with RuntimeError: batch memcpy failed: err=1 failIdx=0; vLLM "
        "goes on by kv_load_failure_policy"
    ]


def test_a_connector_of_the_scheduler_has_no_failed_loads(rows):
    assert Connector().get_block_ids_with_load_errors() == set()


def ends_with(why):
    return (
        "kvpatch ends the engine: blocks could not be copied between the device and the CPU tier, "
        f"because {why}; {REMEDY}. [KVP422]"
    )


def test_a_load_into_one_of_several_groups_ends_the_engine(rows):
    """vLLM knows invalid blocks by numbers, which each group has of its own."""
    worker = one_load(failing([0]), groups=2)
    with pytest.raises(Halted) as ended:
        worker._poll_stream_events(False)
    assert str(ended.value) == ends_with(
        "a load of 2 blocks failed with RuntimeError: batch memcpy failed: err=1 failIdx=0 and "
        "vLLM cannot compute blocks of several KV cache groups again"
    )


def test_a_store_of_one_of_several_groups_does_not(rows):
    worker = copied(failing([1]), (STORE, [1], [2]), groups=2)
    assert worker._poll_stream_events(True) == 0


@pytest.mark.parametrize("is_store", [False, True])
def test_a_device_that_cannot_copy_any_more_ends_the_engine(rows, is_store):
    """CUDA's errors stay: the stream cannot be waited for either."""
    backend = Backend(failing([1]))
    backend.streams[is_store] = Event(RuntimeError("CUDA error: an illegal memory access"))
    worker = Worker(backend)
    backend.start()
    backend.launch_copy([1], [2], is_store, 0, worker.events(is_store))
    backend.shutdown()
    with pytest.raises(Halted, match="and its stream cannot be used any more;"):
        worker._poll_stream_events(is_store)


@pytest.mark.parametrize("waits", [False, True])
def test_an_event_that_fails_ends_the_engine_with_one_sentence(rows, waits):
    worker = Worker(Backend(failing()))
    worker._load_events.append((0, Event(RuntimeError("CUDA error"))))
    with pytest.raises(Halted) as ended:
        worker._flush_and_sync_all() if waits else worker._poll_stream_events(False)
    assert str(ended.value) == ends_with(
        "a copy failed on the device with RuntimeError: CUDA error"
    )


@pytest.mark.parametrize("more", [0, 1])
def test_one_more_failure_in_a_row_than_is_tolerated_ends_the_engine(rows, warned, more):
    """A request that is loaded again and again would never end."""
    many = failures.TOLERATED + more
    worker = one_load(failing(*([one] for one in range(many))), events=many + 1 - more)
    if more:
        with pytest.raises(Halted, match="failIdx=0 and so did the 3 before it;"):
            worker._poll_stream_events(False)
    else:
        assert worker._poll_stream_events(False) == many
        assert len(warned.messages) == many


def test_a_copy_that_succeeds_in_the_other_direction_does_not_count(rows):
    many = failures.TOLERATED + 1
    worker = copied(failing([7]), *[(LOAD, [7], [1]), (STORE, [8], [2])] * many)
    assert worker._poll_stream_events(True) == many - 1
    with pytest.raises(Halted, match="so did the 3 before it"):
        worker._poll_stream_events(False)


def test_one_that_succeeds_in_the_same_direction_does(rows):
    loads = [(LOAD, [7], [1]), (LOAD, [8], [1])] * (2 * failures.TOLERATED)
    worker = copied(failing([7]), *loads)
    assert worker._poll_stream_events(False) == len(loads) - 1


def test_a_thread_that_cannot_begin_fails_each_copy_and_ends_when_it_is_told_to(rows):
    no_device = raising(RuntimeError("no such device"))
    worker = copied(failing(), (STORE, [1], [2]), device=no_device)
    ((event, failure),) = worker._store_events
    assert (event, failure.event, failure.blocks, failure.in_a_row) == (0, 0, [2], 1)


def test_at_the_end_a_failed_copy_is_no_error(rows):
    worker = one_load(failing([0]), groups=2)
    worker._backend.shutdown = lambda: None
    connector = SimpleNamespace(worker_handler=worker)
    assert lifetime.around_shutdown(lambda: "done", connector, (), {}) == "done"


def test_an_error_of_the_row_is_told_once():
    failure = Failure(RuntimeError("one"), 0, True, [1], 1, lost=False)
    for ask in (failure.query, failure.synchronize):
        with pytest.raises(failures.CopyFailed, match="RuntimeError: one"):
            ask()
    failure.noted = True
    failure.synchronize()
    assert failure.query() is True


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (AssertionError(), "AssertionError"),
        (RuntimeError("CUDA error: unspecified launch failure"), None),
    ],
)
def test_a_failed_copy_of_the_offloading_connector_is_named(error, named):
    with pytest.raises(Halted) as ended:
        around_transfers(raising(error), None, ({"request"},), {})
    named = named or "RuntimeError: CUDA error: unspecified launch failure"
    assert str(ended.value) == ends_with(f"the copies failed with {named}")
    assert ended.value.__cause__ is error


OURS = pytest.mark.parametrize(
    "error",
    [
        Refusal("a is b", "c is d", "do e", code="KVP404"),
        Violation("wrong bytes", 1, 2, 3, "request"),
    ],
    ids=["refusal", "debug mode"],
)


@OURS
def test_what_another_row_has_found_says_what_it_is(error):
    with pytest.raises(type(error)) as raised:
        around_transfers(raising(error), None, (), {})
    assert raised.value is error


@OURS
def test_so_it_does_where_the_simple_connectors_events_are_asked_for(rows, error):
    worker = Worker(Backend(failing()))
    worker._load_events.append((0, Event(error)))
    with pytest.raises(type(error)) as raised:
        worker._poll_stream_events(False)
    assert raised.value is error


def test_a_copy_that_succeeds_is_vllms():
    assert around_transfers(lambda *given: given, None, (1,), {}) == (1,)


def test_every_call_that_makes_or_ends_copies_is_watched():
    rows = [row for row in OFFLOADING.patches if row.wrapper.endswith(":around_transfers")]
    methods = {row.target.rpartition(".")[2] for row in rows}
    assert methods == {"start_kv_transfers", "handle_preemptions", "get_finished"}
