"""A worker's set-up that fails, and what is asked of kvcached when an allocation fails."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from fakes import module, raising

from kvpatch.patches.elastic_memory import allocation, reservation
from kvpatch.refusal import Refusal

MODULE = "kvcached.integration.vllm.allocation_attempt"
REQUEST = SimpleNamespace(request_id="one")


@pytest.fixture
def manager(monkeypatch):
    """A ``KVCacheManager`` with the calls that its attempts have seen."""
    made = SimpleNamespace(coordinator=object(), seen=[])

    class AllocationAttempt:
        def __init__(self, coordinator):
            assert coordinator is made.coordinator
            made.seen.append("new")

        def begin(self, request_id):
            made.seen.append(f"begin {request_id}")

        def rollback(self):
            made.seen.append("rollback")

        def end(self):
            made.seen.append("end")

    module(monkeypatch, MODULE, AllocationAttempt=AllocationAttempt)
    return made


def allocate(manager, result, *args, **kwargs):
    def wrapped(*args, **kwargs):
        manager.seen.append("allocate")
        if isinstance(result, Exception):
            raise result
        return result

    return allocation.around_allocate_slots(wrapped, manager, args, kwargs)


def test_what_was_given_stays(manager):
    blocks = object()
    assert allocate(manager, blocks, REQUEST, 32) is blocks
    assert allocate(manager, blocks, request=REQUEST) is blocks
    once = ["begin one", "allocate", "end"]
    assert manager.seen == ["new", *once, *once]


@pytest.mark.parametrize("result", [None, ValueError("no pages")], ids=["no room", "an error"])
def test_what_no_room_was_found_for_is_taken_back_and_so_is_what_an_error_left(manager, result):
    with pytest.raises(ValueError, match="no pages") if result else nullcontext():
        assert allocate(manager, result, REQUEST, 32) is None
    assert manager.seen == ["new", "begin one", "allocate", "rollback", "end"]


def set_up(*args, error=None, **kwargs):
    def init_kvcached(tp_rank=0, world_size=1, pp_rank=0, is_worker=False, device=None):
        if error:
            raise error

    allocation.around_worker_setup(init_kvcached, None, args, kwargs)


SENTENCE = (
    "kvpatch refuses to start vLLM: kvcached could not be set up in this worker, because it failed "
    "with OSError: [Errno 98] Address already in use; fix that error, or set KVPATCH=0. [KVP403]"
)
IN_USE = OSError(98, "Address already in use")
WORKER = {"is_worker": True}


def test_a_worker_whose_set_up_fails_is_refused():
    set_up(is_worker=True)
    for arguments, named in (((0, 1, 0, True), {}), ((), WORKER), ((0, 1, 0), WORKER)):
        with pytest.raises(Refusal) as refused:
            set_up(*arguments, error=IN_USE, **named)
        assert str(refused.value) == SENTENCE
        assert refused.value.__cause__ is IN_USE


def test_a_refusal_and_what_fails_in_an_engine_stay_what_they_are():
    with pytest.raises(OSError, match="in use"):
        set_up(error=IN_USE)
    refusal = Refusal("a", "b", "c", code="KVP416")
    with pytest.raises(Refusal) as refused:
        set_up(is_worker=True, error=refusal)
    assert refused.value is refusal


@pytest.mark.parametrize(
    ("error", "sentence"),
    [(IN_USE, SENTENCE), (Refusal("a", "b", "c", code="KVP416"), "c. [KVP416]")],
)
def test_a_set_up_whose_error_kvcached_only_logs(monkeypatch, error, sentence):
    """Up to vLLM 0.28 kvcached catches what its set-up raises, and goes on without it."""
    monkeypatch.setattr(allocation, "_setup_error", None)

    def runner():
        with pytest.raises(type(error)) as raised:  # for kvcached to log
            allocation.remember_setup_error(raising(error), None, (), {})
        assert raised.value is error

    with pytest.raises(Refusal) as refused:
        allocation.require_setup(runner, None, (), {})
    assert str(refused.value).endswith(sentence)


def test_what_went_well_is_passed_on(monkeypatch):
    """A runner after one that failed, in the same process, is not refused for it."""
    monkeypatch.setattr(allocation, "_setup_error", IN_USE)
    assert allocation.remember_setup_error(lambda: "set up", None, (), {}) == "set up"
    for require in (allocation.require_setup, allocation.require_coordinator):
        assert require(lambda: "made", None, (), {}) == "made"


@pytest.mark.parametrize("reserved", [False, True], ids=["before block 0", "after it"])
def test_a_request_waits_for_block_0_without_the_lock_that_reserves_it(reserved):
    """kvcached's callers hold it while they wait."""
    manager = SimpleNamespace(_lock=threading.RLock(), _post_init_done=threading.Event())

    def reserve():
        with manager._lock:
            manager._post_init_done.set()

    if reserved:
        reserve()
    thread = threading.Thread(target=reserve)
    with manager._lock:
        thread.start()
        assert reservation.around_wait(manager._post_init_done.is_set, manager, (), {})
    thread.join()


def test_in_synchronous_scheduling_kvcacheds_own_wait_is_left_to_it():
    manager = SimpleNamespace(_lock=SimpleNamespace(), _post_init_done=threading.Event())
    assert reservation.around_wait(lambda: "its own", manager, (), {}) == "its own"


@pytest.mark.parametrize(
    "error", [RuntimeError("two groups"), Refusal("a", "b", "c", code="KVP416")]
)
def test_an_error_that_kvcached_passes_on_stays_what_it_is(error):
    with pytest.raises(RuntimeError) as raised:
        allocation.require_coordinator(raising(error), None, (), {})
    assert raised.value is error


def test_a_pool_that_kvcached_could_not_replace_is_a_refusal():
    """kvcached only warns of it, and vLLM would go on with its own blocks."""
    with pytest.raises(Refusal) as refused:
        allocation.require_coordinator(raising(IN_USE), None, (), {})
    assert refused.value.code == "KVP404"
    assert refused.value.__cause__ is IN_USE
