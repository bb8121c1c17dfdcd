"""A sleep is a suspension, and then vLLM's own; what ends it otherwise leaves the engine awake."""

import logging
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from suspend_world import PAGE, filled

from kvpatch import state
from kvpatch.patches.host_device import weights
from kvpatch.patches.secondary_tiers.weights import Calls
from kvpatch.patches.sleep import asleep
from kvpatch.patches.suspend.suspension import Phase, Suspension


class Sleeper:
    """An engine with vLLM's own sleep, which pauses, resets and empties the executor.

    Attributes:
        resets: whether each reset of all caches was of the connector's too.
        later: what vLLM's sleep returns, where it has to wait.
    """

    def __init__(self, world):
        self.world = world
        self.model_executor = SimpleNamespace(is_sleeping=False)
        self.resets = []
        self.later = None
        self.error = None
        state.attach(self, world.suspension)

    def sleep(self, *args, **kwargs):
        return asleep.around_sleep(self._sleep, self, args, kwargs)

    def _sleep(self, level=1, mode="abort"):
        if self.error is not None:
            raise self.error
        if self.later is None:
            self._reset_caches()
        self.model_executor.is_sleeping = True
        return self.later

    def _reset_caches(self, *args, **kwargs):
        def reset(reset_running_requests=True, reset_connector=True):
            self.resets.append(reset_connector)

        asleep.around_reset(reset, self, args, kwargs)

    def release(self):
        def release():
            self._reset_caches()
            self.model_executor.is_sleeping = True

        return asleep.around_release(release, self, (), {})

    def wake_up(self, tags=None):
        def wake(tags=None):
            self.model_executor.is_sleeping = tags == ["weights"]
            return not self.model_executor.is_sleeping

        return asleep.around_wake_up(wake, self, (tags,), {})

    def call(self, method):
        def call(method):
            state.of(self, Calls).unanswered |= "weight" in method

        asleep.around_call(call, self, (method,), {})

    def step(self):
        return asleep.after_engine_step(self.world.step, self, (), {})

    def until_idle(self):
        for _ in range(200):
            if not self.step():
                return
        raise AssertionError("it steps for ever")


@pytest.fixture
def sleeper(worlds):
    return Sleeper(filled(worlds))


def test_it_sleeps_once_everything_is_stored_and_keeps_the_tier(sleeper):
    sleeping = sleeper.sleep()
    assert not sleeping.done()
    assert sleeper.sleep(level=1) is sleeping, "asked again, it begins again"
    sleeper.until_idle()
    assert sleeping.result(0) is None
    assert sleeper.resets == [False]
    assert sleeper.world.suspension.phase is Phase.SUSPENDED
    assert sleeper.world.suspension.said["lost"] == 0
    assert sleeper.world.manager.limit == PAGE
    assert sleeper.sleep(1, "abort") is None, "it sleeps already"
    assert sleeper.resets == [False, False]
    assert not sleeper.wake_up(["weights"])
    assert sleeper.world.suspension.phase is Phase.SUSPENDED
    assert sleeper.wake_up()
    sleeper.until_idle()
    assert sleeper.world.suspension.phase is Phase.RUNS
    sleeper._reset_caches()
    assert sleeper.resets[-1], "a reset that is no sleep's was left out"


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("method", ["reload_weights", "an operator's"])
def test_what_is_called_while_it_sleeps_may_replace_weights(sleeper, method, again):
    sleeper.sleep()
    sleeper.until_idle()
    assert not sleeper.wake_up(["weights"])
    sleeper.call(method)
    if again:
        sleeper.sleep()
    assert not any(sleeper.resets), "its KV cache is not there"
    assert sleeper.wake_up()
    assert sleeper.resets[-1]
    count = len(sleeper.resets)
    assert sleeper.wake_up()
    assert len(sleeper.resets) == count


def test_weights_that_are_replaced_after_it_woke_up_are_answered_at_once_and_once(sleeper):
    sleeper.call("reload_weights")
    assert sleeper.resets == [], "no sleep has kept anything"
    state.drop(sleeper, Calls)
    sleeper.sleep()
    sleeper.until_idle()
    assert sleeper.wake_up()
    sleeper.call("an operator's")
    assert sleeper.resets == [False]
    for _ in range(2):
        sleeper.call("reload_weights")
        assert sleeper.resets == [False, True]


def test_vllms_own_wait_is_waited_for(sleeper):
    sleeper.later = Future()
    sleeping = sleeper.sleep(level=1, mode="wait")
    sleeper.until_idle()
    assert not sleeping.done()
    sleeper._reset_caches()
    sleeper.later.set_result(None)
    assert sleeping.result(0) is None
    assert sleeper.resets == [False]


@pytest.mark.parametrize("when", ["at once", "later"])
def test_an_engine_that_cannot_sleep_runs(sleeper, when):
    error = RuntimeError("no")
    if when == "later":
        sleeper.later = Future()
    else:
        sleeper.error = error
    sleeping = sleeper.sleep()
    sleeper.until_idle()
    if sleeper.later is not None:
        sleeper.later.set_exception(error)
    assert sleeping.exception(0) is error
    sleeper.until_idle()
    assert sleeper.world.suspension.phase is Phase.RUNS
    sleeper._reset_caches()
    assert sleeper.resets == [True]


def test_woken_up_before_it_slept_it_runs(sleeper):
    sleeping = sleeper.sleep()
    sleeper.step()
    assert sleeper.wake_up()
    assert "woken up before it slept" in str(sleeping.exception(0))
    sleeper.until_idle()
    assert sleeper.world.suspension.phase is Phase.RUNS
    assert not sleeper.model_executor.is_sleeping


def test_a_suspension_of_somebody_else_stays(sleeper):
    sleeper.world.suspension.suspend(False, False, None)
    sleeper.until_idle()
    assert sleeper.sleep().result(0) is None
    assert sleeper.wake_up()
    sleeper.until_idle()
    assert sleeper.world.suspension.phase is Phase.SUSPENDED


def test_a_suspension_that_is_given_up_is_no_reason_to_stay_awake(sleeper, caplog):
    sleeping = sleeper.sleep()
    sleeper.step()
    sleeper.world.suspension.resume()
    with caplog.at_level(logging.WARNING):
        sleeper.until_idle()
    assert sleeping.result(0) is None
    assert sleeper.resets == [False]
    assert "lost in this sleep: it was resumed before it was suspended" in caplog.text
    assert sleeper.wake_up()
    assert sleeper.world.suspension.phase is Phase.RUNS


def test_what_cannot_be_suspended_sleeps_at_once(sleeper, caplog):
    state.attach(sleeper.world, Calls(unanswered=True))
    with caplog.at_level(logging.WARNING):
        assert sleeper.sleep() is None
    assert "lost in this sleep: its weights were replaced" in caplog.text
    assert sleeper.resets == [False]


def test_released_memory_goes_to_the_floor_and_comes_back_with_every_cache_empty(sleeper):
    sleeper.world.pool.evict_blocks(set(sleeper.world.pool.content))  # as vLLM's reset does
    released = sleeper.release()
    assert sleeper.resets == [True]
    sleeper.until_idle()
    assert released.result(0) is None
    assert sleeper.world.suspension.phase is Phase.SUSPENDED
    assert sleeper.world.manager.limit == PAGE
    assert sleeper.world.suspension.said["kept"] == 0
    assert sleeper.wake_up(["kv_cache"])
    sleeper.until_idle()
    assert sleeper.world.suspension.phase is Phase.RUNS
    sleeper._reset_caches()
    assert sleeper.resets == [True, True], "the release was taken for a sleep that keeps the tier"


def test_memory_is_released_without_a_tier_to_store_in(sleeper):
    world = sleeper.world
    bare = Suspension(world, None, "it has no KV connector")
    state.attach(sleeper, bare)
    world.suspension = bare
    world.pool.evict_blocks(set(world.pool.content))
    released = sleeper.release()
    sleeper.until_idle()
    assert (released.result(0), bare.phase) == (None, Phase.SUSPENDED)
    assert world.manager.limit == PAGE
    assert sleeper.wake_up()
    sleeper.until_idle()
    assert bare.phase is Phase.RUNS


def test_an_engine_in_the_callers_process_keeps_its_tier_and_says_that_its_pages_stay(
    sleeper, caplog
):
    state.drop(sleeper, Suspension)
    assert sleeper.sleep() is None
    assert sleeper.resets == [False]
    with caplog.at_level(logging.WARNING):
        assert sleeper.release() is None
    assert "stay mapped: the engine is in the caller's process" in caplog.text
    assert sleeper.resets == [False, True]


@pytest.mark.parametrize("level", [0, 2])
def test_other_levels_are_vllms(sleeper, level):
    assert sleeper.sleep(level=level) is None
    assert sleeper.resets == [True]
    assert sleeper.world.suspension.phase is Phase.RUNS


@pytest.fixture
def worker():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    return SimpleNamespace(model_runner=SimpleNamespace(model=model))


def test_weights_that_left_are_no_numbers_and_come_back(worker):
    import torch

    model = worker.model_runner.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights.leave(None, worker, (), {"level": 1})
    assert all(tensor.isnan().all() for tensor in model.parameters())
    weights.come_back(None, worker, (["kv_cache"],), {})
    assert all(tensor.isnan().all() for tensor in model.parameters())
    weights.come_back(None, worker, (), {})
    now = model.state_dict()
    assert all(torch.equal(tensor, now[name]) for name, tensor in before.items())


def test_level_2_brings_the_buffers_back_alone(worker):
    model = worker.model_runner.model
    model[1].running_mean.fill_(3)
    weights.leave(None, worker, (2,), {})
    model[1].running_mean.fill_(0)
    weights.come_back(None, worker, (), {"tags": ["weights"]})
    assert (model[1].running_mean == 3).all()
    assert all(tensor.isnan().all() for tensor in model.parameters())


def test_the_host_device_has_sleep_mode():
    assert weights.available(lambda: False, None, (), {})
