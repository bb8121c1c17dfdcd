"""Which loaded request lets go, and what is left of it."""

from types import SimpleNamespace

import pytest
from test_deadlock import OldScheduler, Queue, Request, Scheduler, Status, request

from kvpatch.patches import deadlock


def test_of_three_the_youngest_lets_go():
    scheduler = Scheduler(request("first", 5), request("old", 1), request("young", 9))
    assert scheduler.steps(deadlock.SEVERAL_WAIT) == ["young"]
    scheduler = Scheduler(request("first", 9), request("young", 5), request("old", 1))
    assert scheduler.steps(deadlock.SEVERAL_WAIT) == ["young"]


def test_a_session_that_waits_for_its_next_input_does_not_hold():
    session = request("session", 2, status=Status.WAITING_FOR_STREAMING_REQ)
    scheduler = Scheduler(request("one", 1), session)
    assert scheduler.steps(deadlock.ONE_WAITS - 1) == []
    assert scheduler.steps(1) == ["one"]


@pytest.mark.parametrize(
    ("preemptions", "status"), [(0, Status.WAITING), (1, Status.PREEMPTED), (2, Status.PREEMPTED)]
)
def test_a_request_that_lets_go_is_what_it_was_before_its_load(preemptions, status):
    loaded = request("loaded", 2, status=Status.WAITING_FOR_REMOTE_KVS)
    loaded.num_preemptions = preemptions
    scheduler = Scheduler(request("old", 1), loaded)
    scheduler._inflight_prefills |= {loaded, "other"}
    scheduler.finished_recving_kv_req_ids.add("loaded")
    assert scheduler.steps(deadlock.SEVERAL_WAIT) == ["loaded"]
    assert loaded.status is status
    assert loaded.num_computed_tokens == 0
    assert scheduler._inflight_prefills == {"other"}
    assert scheduler.finished_recving_kv_req_ids == set()


def test_a_request_that_vllm_has_seen_is_not_looked_at_again():
    one = request("one", 2, status=Status.PREEMPTED)
    scheduler = Scheduler(request("old", 1), one)
    scheduler._update_waiting_for_remote_kv = pytest.fail
    assert scheduler.steps(deadlock.SEVERAL_WAIT) == ["one"]
    assert one.status is Status.PREEMPTED


def test_one_load_in_flight_is_enough_to_wait_for():
    loading = request("loading", 3, status=Status.WAITING_FOR_REMOTE_KVS)
    scheduler = Scheduler(request("one", 1), request("two", 2), loading)
    assert scheduler.steps(deadlock.SEVERAL_WAIT - 1) == []
    scheduler.finished_recving_kv_req_ids.add("loading")
    assert scheduler.steps(deadlock.SEVERAL_WAIT - 1) == []
    scheduler.finished_recving_kv_req_ids.remove("loading")
    assert scheduler.steps(1) == []  # begins the count anew
    scheduler.finished_recving_kv_req_ids.add("loading")
    assert scheduler.steps(deadlock.SEVERAL_WAIT - 1) == []
    assert scheduler.steps(1) == ["loading"]


@pytest.mark.parametrize(
    "change",
    [
        {"running": ["r"]},
        {"connector": None},
        {"pause_state": SimpleNamespace(name="PAUSED_ALL")},
        {"requests": {}},
    ],
)
def test_progress_a_pause_and_a_step_without_holders_begin_the_count_anew(change):
    scheduler = Scheduler(request("one", 1), request("two", 2))
    scheduler.pause_state = SimpleNamespace(name="UNPAUSED")
    scheduler.steps(deadlock.SEVERAL_WAIT - 1)
    before = {name: vars(scheduler)[name] for name in change}
    vars(scheduler).update(change)
    scheduler.steps(1)
    vars(scheduler).update(before)
    assert scheduler.steps(deadlock.SEVERAL_WAIT - 1) == []
    assert scheduler.steps(1) == ["two"]


def test_two_let_go_one_after_the_other():
    """The count begins anew after each, for the freed memory to be used."""
    scheduler = Scheduler(request("one", 1), request("two", 2), request("three", 3))
    assert scheduler.steps(2 * deadlock.SEVERAL_WAIT - 1) == ["three"]
    assert scheduler.steps(1) == ["three", "two"]


def test_one_alone_in_no_queue_waits_long_and_two_are_several():
    """Its load has ended, but it is in a queue that this release does not have."""
    scheduler = Scheduler(request("one", 1))
    scheduler.waiting = Queue()
    assert scheduler.steps(deadlock.ONE_WAITS - 1) == []
    assert scheduler.steps(1) == ["one"]
    scheduler = Scheduler(request("one", 1), request("two", 2))
    scheduler.waiting = Queue()
    assert scheduler.steps(deadlock.SEVERAL_WAIT) == ["two"]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        *((queue, None) for queue in deadlock.QUEUES),
        ("kv_holding_waiting", "skipped_waiting"),
        ("skipped_waiting", "waiting"),
    ],
)
def test_the_queues_are_tried_in_vllms_order_and_each_from_its_head(first, then):
    """The head would allocate the blocks again: it keeps them, although it is the youngest."""
    head, other = request("head", 9), request("other", 1)
    scheduler = Scheduler(head, other)
    scheduler.waiting = Queue()
    for queue, one in ((first, head), (then, other)):
        if queue is not None:
            setattr(scheduler, queue, Queue([one]))
    assert scheduler.steps(deadlock.SEVERAL_WAIT) == ["other"]


def test_up_to_0_23_the_blocks_are_freed_at_once():
    old, young = request("old", 1), request("young", 2)
    assert OldScheduler(old, young).steps(deadlock.SEVERAL_WAIT) == [young]
    assert young.num_computed_tokens == 0


def test_what_has_computed_nothing_holds_nothing():
    scheduler = Scheduler(request("a", 1, computed=0), request("b", 2, computed=0))
    assert scheduler.steps(2 * deadlock.ONE_WAITS) == []
    scheduler = Scheduler(request("a", 1, computed=1), request("b", 2, computed=1))
    assert scheduler.steps(deadlock.SEVERAL_WAIT) == ["b"]


def test_a_running_request_does_not_let_go():
    class Running:
        name = "RUNNING"

    one = Request(**vars(request("one", 1)))
    one.status = Running
    assert not deadlock.holds(one)
