"""When the scheduler stands still, and which loaded request lets go."""

from enum import Enum
from types import SimpleNamespace

from kvpatch.patches import deadlock


class Status(Enum):
    WAITING = 1
    PREEMPTED = 2
    WAITING_FOR_REMOTE_KVS = 3
    WAITING_FOR_STREAMING_REQ = 4


class Request(SimpleNamespace):
    __hash__ = object.__hash__


class Queue(list):
    def peek_request(self):
        return self[0]


class Scheduler:
    """As much of vLLM's as the patch looks at."""

    def __init__(self, *waiting):
        self.waiting = Queue(waiting)
        self.policy = SimpleNamespace(name="FCFS")
        self.requests = {request.request_id: request for request in waiting}
        self.running = []
        self.connector = object()
        self.pause_state = SimpleNamespace(name="UNPAUSED")
        self.finished_recving_kv_req_ids = set()
        self._inflight_prefills = set()
        self.freed = []

    def _free_request_blocks(self, request):
        self.freed.append(request.request_id)

    def _update_waiting_for_remote_kv(self, request):
        self.finished_recving_kv_req_ids.remove(request.request_id)

    def steps(self, count, scheduled=0):
        output = SimpleNamespace(total_num_scheduled_tokens=scheduled)
        for _ in range(count):
            assert deadlock.around_schedule(lambda: output, self, (), {}) is output
        return self.freed


def request(name, arrival, computed=640, status=Status.WAITING):
    made = Request(
        request_id=name, arrival_time=arrival, num_computed_tokens=computed, status=status
    )
    made.num_preemptions = 0
    return made


def test_the_youngest_of_several_lets_go():
    old, young = request("old", 1), request("young", 2)
    scheduler = Scheduler(old, young)
    assert scheduler.steps(deadlock.SEVERAL_WAIT - 1) == []
    assert scheduler.steps(1) == ["young"]
    assert young.num_computed_tokens == 0
    # The other one is alone now, and waits for long.
    assert scheduler.steps(deadlock.ONE_WAITS - 1) == ["young"]
    assert scheduler.steps(1) == ["young", "old"]


def test_one_alone_lets_go_soon_when_another_waits_before_it():
    first, loaded = request("first", 1, computed=0, status=Status.PREEMPTED), request("loaded", 2)
    assert Scheduler(first, loaded).steps(deadlock.SEVERAL_WAIT) == ["loaded"]
    # What comes after it would get nothing before it.
    assert Scheduler(loaded, first).steps(deadlock.ONE_WAITS - 1) == []


def test_who_is_tried_first_keeps_what_it_would_only_take_again():
    young, old = request("young", 2, status=Status.PREEMPTED), request("old", 1)
    assert Scheduler(young, old).steps(deadlock.SEVERAL_WAIT) == ["old"]


def test_by_priority_who_is_tried_first_may_wait_in_either_queue():
    class Ordered(Request):
        def __lt__(self, other):
            return self.priority < other.priority

    for swap in (False, True):
        made = [Ordered(**vars(request(name, 1)), priority=n) for n, name in enumerate("ab")]
        queues = (made[1:], made[:1]) if swap else (made[:1], made[1:])
        scheduler = Scheduler(*made)
        scheduler.policy = SimpleNamespace(name="PRIORITY")
        scheduler.waiting, scheduler.skipped_waiting = map(Queue, queues)
        assert scheduler.steps(deadlock.SEVERAL_WAIT) == ["b"]


def test_a_step_that_computes_begins_the_count_anew():
    scheduler = Scheduler(request("one", 1), request("other", 2))
    for _ in range(3):
        scheduler.steps(deadlock.SEVERAL_WAIT - 1)
        scheduler.steps(1, scheduled=5)
    assert scheduler.freed == []


class OldScheduler:
    """As 0.16 has it: not to be paused, and with frees that never wait."""

    steps = Scheduler.steps
    _update_waiting_for_remote_kv = Scheduler._update_waiting_for_remote_kv

    def __init__(self, *waiting):
        self.requests = {request.request_id: request for request in waiting}
        self.running, self.connector, self.freed = [], object(), []
        self.waiting = Queue(waiting)
        self.policy = SimpleNamespace(name="FCFS")
        self.finished_recving_kv_req_ids = set()
        self.kv_cache_manager = SimpleNamespace(free=self.freed.append)


def test_up_to_0_17_a_loaded_request_has_no_tokens_before_it_is_looked_at():
    old, young = request("old", 1), request("young", 2, computed=0)
    young.status = Status.WAITING_FOR_REMOTE_KVS
    scheduler = OldScheduler(old, young)
    assert scheduler.steps(2 * deadlock.SEVERAL_WAIT) == []  # still loading
    scheduler.finished_recving_kv_req_ids.add("young")
    assert scheduler.steps(deadlock.SEVERAL_WAIT) == [young]
    assert young.status is Status.WAITING
