"""Resets on the scheduler side of vLLM's own OffloadingConnector, without an engine."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from packaging.version import Version

from kvpatch import state
from kvpatch.patch import Transaction
from kvpatch.patches import fence
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.patches.offloading import FEATURE
from kvpatch.supported import release_of
from kvpatch.versions import installed

RELEASE = release_of(installed("vllm")[0])
RESETS = (
    "offloading.preempted_loads",
    "offloading.reset_again",
    "offloading.reset_with_jobs",
    "offloading.reset_of_requests",
    "offloading.name_preempted",
    "offloading.lookup",
    "offloading.computed_tokens",
)
RESET_OF_WINDOWS = "fence.window_blocks_of_reset"
RESETTABLE = pytest.mark.skipif(Version("0.22") > RELEASE, reason="no reset of the connector")
NAMED = Version("0.25") <= RELEASE  # vLLM names the requests that a reset preempts


@pytest.fixture
def rows():
    """The rows of this module in force, as far as this release has them."""
    transaction = Transaction()
    transaction.apply_all(row for row in FEATURE.at(RELEASE) if row.id in RESETS)
    yield transaction
    transaction.revert_to(0)


def applied(rows, *ids):
    return [one.patch.id for one in rows.applied if one.patch.id in ids]


class Tier:
    """A CPU tier of which only the resets count."""

    lock = nullcontext()  # from 0.33 on the connector takes it

    def __init__(self):
        self.resets = 0

    def reset_cache(self):
        self.resets += 1

    def __getattr__(self, name):
        return lambda *args: None


class Planner:
    """vLLM's scheduler side with one request, which is running."""

    def __init__(self):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

        of = scheduler.OffloadingConnectorScheduler
        self.real = made = of.__new__(of)
        self.request = SimpleNamespace(
            request_id="one",
            num_output_placeholders=0,
            skip_reading_prefix_cache=False,
            is_finished=lambda: False,
        )
        self.status = SimpleNamespace(
            req=self.request,
            req_context=None,
            transfer_jobs=set(),
            group_states=[],
            partial_tail_boundary=None,
            finished_signaled=False,
        )
        made.manager = Tier()
        made._req_status = {"one": self.status}
        made._jobs, made._block_id_to_pending_jobs = {}, {}
        made._job_counter = made._stale_job_threshold = 0
        made._current_batch_load_jobs, made._current_batch_jobs_to_flush = {}, set()
        made._current_batch_allocated_block_ids = set()
        made._current_batch_sync_loads, made._current_batch_sync_load_bytes = set(), 0
        made._reset_fence, made._reset_fence_since = {}, 0.0  # of 0.33
        made._chunks_being_loaded = made._blocks_being_loaded = None
        made._events_tracker = Tier()
        made._update_req_states = lambda output: None
        made._build_partial_tail_store_jobs = made._build_store_jobs = lambda output: {}

    def job(self, store):
        """Begin a copy of the request; a load is given to the workers in the next step."""
        made, number = self.real, self.real._job_counter
        made._job_counter += 1
        made._jobs[number] = SimpleNamespace(is_store=store, is_sync_load=False, pending_count=1)
        self.status.transfer_jobs.add(number)
        if not store:
            made._current_batch_load_jobs[number] = f"load {number}"
        return number

    def reset_requests(self):
        """Reset the device's cache as an operator does, with vLLM's scheduler; "one" runs."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
            OffloadingConnector,
        )
        from vllm.v1.core.sched.scheduler import Scheduler

        scheduler = Scheduler.__new__(Scheduler)
        scheduler.connector = OffloadingConnector.__new__(OffloadingConnector)
        scheduler.connector.connector_scheduler = self.real
        scheduler.running = [self.request]
        scheduler.prev_step_scheduled_req_ids = set()
        scheduler.reset_preempted_req_ids = set()
        scheduler.kv_cache_manager = SimpleNamespace(reset_prefix_cache=lambda: True)
        scheduler._preempt_request = lambda request, timestamp: None
        assert scheduler.reset_prefix_cache(True)

    def step(self, preempted=()):
        """Plan a step; return what the workers are given."""
        output = SimpleNamespace(
            preempted_req_ids=set(preempted), finished_req_ids=set(), scheduled_new_reqs=[]
        )
        return self.real.build_connector_meta(output)


@pytest.fixture
def planner():
    return Planner()


def test_a_request_is_loaded_in_the_step_that_names_it_as_preempted(planner, rows):
    if not NAMED:
        planner.reset_requests()
    load = planner.job(store=False)
    meta = planner.step(preempted=("one", "unknown") if NAMED else ())
    assert meta.load_jobs == {load: f"load {load}"}
    assert load not in meta.jobs_to_flush
    assert planner.status.transfer_jobs == {load}, "its end is still to be reported"


def test_the_stores_of_a_preempted_request_are_waited_for(planner, rows):
    stores = {planner.job(store=True), planner.job(store=True)}
    assert planner.step(preempted=("one",)).jobs_to_flush == stores
    assert planner.status.transfer_jobs == stores


def test_a_load_of_an_earlier_step_is_no_surprise_that_is_passed_over(planner, rows):
    load = planner.job(store=False)
    planner.step()
    with pytest.raises(AssertionError):
        planner.step(preempted=("one",))
    assert planner.status.transfer_jobs == {load}


def test_without_the_row_such_a_load_ends_the_engine(rows, planner):
    for name in applied(rows, "offloading.preempted_loads"):
        rows.revert(name)
        planner.job(store=False)
        with pytest.raises(AssertionError):
            planner.step(preempted=("one",))


@RESETTABLE
def test_two_resets_before_a_step_reset_the_tier_twice(rows, planner):
    jobs = {planner.job(store=True), planner.job(store=True)}
    for _ in range(3):
        planner.real.reset_cache()
    assert planner.real.manager.resets == 3
    assert planner.real._jobs == {}
    assert planner.step().jobs_to_flush == jobs, "the workers wait for what was in flight"
    assert not planner.step().jobs_to_flush


@RESETTABLE
def test_a_reset_forgets_the_copies_of_requests(rows, planner):
    store = planner.job(store=True)
    planner.real.reset_cache()
    assert planner.status.transfer_jobs == set()
    assert planner.step(preempted=("one",)).jobs_to_flush == {store}


@pytest.mark.parametrize("left", ["a load", "a flush"])
@RESETTABLE
def test_a_reset_while_a_step_is_scheduled_fails_as_before(rows, planner, left):
    if left == "a load":
        planner.job(store=False)
    else:
        planner.real._current_batch_jobs_to_flush.add(planner.job(store=True))
    waits_for = set(planner.real._current_batch_jobs_to_flush)
    with pytest.raises(AssertionError):
        planner.real.reset_cache()
    assert planner.real.manager.resets == 0
    assert planner.real._current_batch_jobs_to_flush == waits_for


@RESETTABLE
def test_without_the_row_a_second_reset_leaves_the_tier_as_it_was(rows, planner):
    (name,) = applied(rows, *RESETS[1:3])
    rows.revert(name)
    planner.job(store=True)
    planner.real.reset_cache()
    with pytest.raises(AssertionError):
        planner.real.reset_cache()
    assert planner.real.manager.resets == 1


def test_without_the_row_before_0_26_a_reset_ends_the_engine(rows, planner):
    for name in applied(rows, "offloading.reset_with_jobs"):
        rows.revert(name)
        planner.job(store=True)
        planner.real.reset_cache()
        with pytest.raises(KeyError):
            planner.step(preempted=("one",))


def test_the_stores_of_a_request_that_a_reset_preempts_are_waited_for(rows, planner):
    if NAMED:
        assert not applied(rows, *RESETS[3:])
        return
    stores = {planner.job(store=True), planner.job(store=True)}
    planner.reset_requests()
    assert planner.step().jobs_to_flush == stores
    planner.real._current_batch_jobs_to_flush = set()
    assert not planner.step().jobs_to_flush, "it is named once"


def test_without_the_rows_its_blocks_are_written_while_they_are_stored(rows, planner):
    for name in applied(rows, *RESETS[3:5]):
        rows.revert(name)
        planner.job(store=True)
        planner.reset_requests()
        assert not planner.step().jobs_to_flush
        return
    assert NAMED


def look_up(planner):
    """Ask how much of the request can be loaded; nothing of it is in the tier."""
    group = SimpleNamespace(block_ids=[7, 8])
    planner.status.group_states = [group]
    planner.status.update_offload_keys = lambda: None
    planner.status.update_num_hit_blocks = planner.status.update_num_hit_chunks = lambda count: None
    planner.real._lookup = lambda status: 32
    planner.real._touch = lambda status: None
    answer = planner.real.get_num_new_matched_tokens(planner.request, 0)
    assert group.block_ids == [], "blocks of before the preemption"
    return answer


def test_a_preempted_request_is_loaded_when_its_stores_have_ended(rows, planner):
    if Version("0.24") <= RELEASE:
        assert not applied(rows, "offloading.lookup"), "vLLM waits by itself"
        return
    store = planner.job(store=True)
    assert look_up(planner) == (None, False)
    planner.status.transfer_jobs.discard(store)
    assert look_up(planner) == (32, True)


def test_a_new_request_is_looked_up_by_vllm(rows, planner):
    # A new request is not known before vLLM looks it up, up to 0.22; later it was announced.
    if Version("0.23") <= RELEASE:
        return
    planner.real._req_status.clear()
    with pytest.raises(AttributeError, match="config"):  # vLLM makes its state from it
        look_up(planner)


def test_without_the_row_it_is_loaded_while_it_is_stored(rows, planner):
    if applied(rows, "offloading.lookup"):
        rows.revert("offloading.computed_tokens")  # of the same function, and above it
        rows.revert("offloading.lookup")
        planner.job(store=True)
        assert look_up(planner) == (32, True)


def test_a_request_that_computes_every_token_loads_none(rows, planner):
    if not applied(rows, "offloading.computed_tokens"):
        return  # vLLM's own work, in other functions of later releases
    planner.request.skip_reading_prefix_cache = True
    answer, asynchronous = look_up(planner)
    assert answer == 0
    assert not asynchronous


def test_without_the_row_it_loads_what_it_was_to_compute(rows, planner):
    for name in applied(rows, "offloading.computed_tokens"):
        rows.revert(name)
        planner.request.skip_reading_prefix_cache = True
        assert look_up(planner) == (32, True)


@pytest.mark.fault(
    "`POST /reset_prefix_cache?reset_external=true` while requests with sliding windows run",
    "what they store again has the bytes of blocks that are still theirs, or nothing",
)
@pytest.mark.skipif(Version("0.23") > RELEASE, reason="before every store, see fence.window_blocks")
@pytest.mark.parametrize("ids", [(11, 12, 13, 14), (0, 0, 13, 14)], ids=["without", "with"])
def test_what_a_window_left_is_not_stored_after_a_reset(ids):
    """vLLM sets a running request back to its first chunk, and keeps the ids of others' blocks."""
    planner, left = Planner(), ids[0] == 0
    group = SimpleNamespace(block_ids=[11, 12, 13, 14], next_stored_chunk_idx=3)
    planner.status.group_states = [group]
    planner.real._sliding_window_groups = (0,)
    planner.real.config = SimpleNamespace(kv_group_configs=[SimpleNamespace(group_idx=1)])
    blocks = [SimpleNamespace(is_null=position < 2) for position in range(4)]
    managers = [None, SimpleNamespace(req_to_blocks={"one": blocks})]
    coordinator = SimpleNamespace(single_type_managers=managers)
    scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(coordinator=coordinator))
    state.attach(planner.real, Fenced(None, None, scheduler))
    transaction = Transaction()
    if left:
        rows = (row for row in fence.FEATURE.at(RELEASE) if row.id == RESET_OF_WINDOWS)
        transaction.apply_all(rows)
    planner.real.reset_cache()
    transaction.revert_to(0)
    assert (group.next_stored_chunk_idx, tuple(group.block_ids)) == (0, ids)
