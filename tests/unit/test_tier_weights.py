"""Weights that are replaced in a running engine, and what the tiers do about it."""

import logging
from types import SimpleNamespace

import pytest
from fakes import raising

from kvpatch import state
from kvpatch.patches.secondary_tiers import FEATURE, admission, weights
from kvpatch.patches.secondary_tiers.fewer_lines import FewerLines
from kvpatch.patches.secondary_tiers.weights import Weights, around_call, around_reset


class Engine:
    """An engine with secondary tiers, and its workers' weights."""

    def __init__(self):
        self.now = "old"
        self.described = 0
        self.folders = []
        self.core = SimpleNamespace()
        self.weights = state.attach(self.core, Weights(self.describe, "old"))
        self.weights.renamed.append(self.folders.append)
        self.planner = SimpleNamespace(
            manager=SimpleNamespace(secondary_tiers=[SimpleNamespace(weights=self.weights)])
        )

    def describe(self):
        self.described += 1
        return self.now

    def replace(self, now):
        def call(method):
            assert method == "reload_weights"
            self.now = now

        around_call(call, self.core, ("reload_weights",), {})

    def reset(self, done=True, connector=True, by_name=False):
        given = {"args": (True, connector), "kwargs": {}}
        if by_name:
            given = {"args": (), "kwargs": {"reset_connector": connector}}
        assert around_reset(lambda *_, **__: done, self.core, **given) is done

    def request(self):
        """Schedule a request; whether the tiers are used for it."""
        admission.around_matched_tokens(lambda: (0, False), self.planner, (), {})
        return self.weights.usable()


@pytest.fixture
def engine():
    """One that has had a request."""
    made = Engine()
    assert made.request()
    return made


@pytest.mark.parametrize("by_name", [False, True])
def test_new_weights_after_a_reset_have_a_folder_of_their_own(engine, by_name):
    """Sleep level 2: vLLM resets its caches first, and the weights are loaded afterwards."""
    engine.reset(by_name=by_name)
    engine.replace("new")
    assert engine.folders == []  # the workers are asked when the weights are all there
    assert engine.request()
    assert engine.folders == ["new"]
    assert engine.weights.described == "new"


def test_a_request_for_which_no_tier_is_asked_uses_the_caches_too():
    """A short one, or one whose blocks vLLM has: the weights are looked at when it is scheduled."""
    engine = Engine()
    assert admission.around_matched_tokens(lambda: (0, False), engine.planner, (), {}) == (0, False)
    assert engine.weights.used
    engine.replace("new")
    assert not engine.request()
    assert engine.folders == []


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_reset_after_the_weights_were_replaced_is_as_good(engine, used, by_name):
    """Also for an engine whose tiers were out of use since."""
    engine.replace("new")
    if used:
        assert not engine.request()
    engine.reset(by_name=by_name)
    assert engine.request()
    assert engine.folders == ["new"]


def test_without_a_reset_tiers_are_not_used_until_there_is_one(engine, warned):
    engine.replace("new")
    assert not engine.request()
    engine.replace("old")  # the caches have blocks of both by now
    assert not engine.request()
    assert "not used until the caches are reset" in warned.text
    engine.now = "new"
    engine.reset()
    assert engine.request()
    assert engine.folders == ["new"]


@pytest.mark.parametrize("given", [{"done": False}, {"connector": False}])
def test_a_reset_that_left_blocks_does_not_count(engine, warned, given):
    engine.reset(**given)
    engine.replace("new")
    assert not engine.request()
    assert engine.folders == []


@pytest.mark.parametrize("args", [(), (True,)])
def test_a_reset_by_its_defaults_is_none_of_the_connector(engine, args):
    assert around_reset(lambda *args: True, engine.core, args, {}) is True
    assert engine.weights.used


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((True,), {}),
        ((True, False), {}),
        ((), {"reset_connector": False}),
        ((), {"reset_running_requests": True}),
    ],
)
@pytest.mark.parametrize("tiers", [True, False])
def test_the_first_reset_after_a_call_to_the_workers_is_of_the_connector_too(
    engine, args, kwargs, tiers
):
    """Without it blocks of the old weights would be loaded from the primary tier."""
    core = engine.core if tiers else SimpleNamespace()
    seen = []

    def reset(reset_running_requests=False, reset_connector=False):
        seen.append((reset_running_requests, reset_connector))
        return len(seen) > 1  # the first one fails: a request runs

    around_call(lambda method: None, core, ("reload_weights",), {})
    for _ in range(3):
        around_reset(reset, core, args, kwargs)
    running = bool(args) or bool(kwargs.get("reset_running_requests"))
    assert seen == [(running, True), (running, True), (running, False)]
    assert engine.weights.used is not tiers


@pytest.mark.parametrize(
    ("args", "kwargs", "both"),
    [
        (("finish_weight_update",), {}, True),
        ((), {"method": "reload_weights"}, True),
        (("profile",), {}, False),
        ((len,), {}, False),
        ((), {}, False),  # wake_up
    ],
)
def test_only_a_method_that_replaces_weights_makes_a_reset_one_of_both(args, kwargs, both):
    core, seen = SimpleNamespace(), []
    around_call(lambda *_, **__: None, core, args, kwargs)
    around_reset(lambda reset_connector=False: seen.append(reset_connector), core, (), {})
    assert seen == [both]


def test_a_call_that_replaces_nothing_changes_nothing():
    engine = Engine()
    for _ in range(3):
        assert engine.request()
    assert engine.described == 0  # nobody called the workers
    engine.replace("old")
    for _ in range(3):
        assert engine.request()
    assert engine.described == 1
    assert engine.folders == []


def test_a_call_that_fails_may_have_replaced_some():
    engine = Engine()
    engine.now = "half"
    with pytest.raises(RuntimeError, match="half"):
        around_call(raising(RuntimeError("half of the weights")), engine.core, (), {})
    assert engine.request()
    assert engine.folders == ["half"]


def test_a_folder_that_cannot_be_made_ends_the_use_and_not_the_engine(warned):
    engine = Engine()
    engine.weights.renamed.append(raising(PermissionError("belongs to the user id 7")))
    engine.replace("new")
    assert not engine.request()
    assert "belongs to the user id 7" in warned.text


def test_an_engine_without_tiers_is_left_alone():
    core = SimpleNamespace()
    assert around_call(lambda method: "done", core, ("reload_weights",), {}) == "done"
    assert around_reset(lambda *_: True, core, (True, True), {})
    assert weights.usable([SimpleNamespace()])


@pytest.mark.parametrize("at", [0, 1])
def test_tiers_are_used_together_or_not_at_all(at):
    engines = [Engine(), Engine()]
    tiers = [SimpleNamespace(weights=engine.weights) for engine in engines]
    assert weights.usable(tiers) is True
    engines[at].replace("new")
    assert weights.usable(tiers) is False


def test_while_tiers_are_not_used_the_workers_are_not_asked_again(engine):
    for now in ("new", "newer", "newest"):
        engine.replace(now)
        assert not engine.request()
    assert engine.described == 1


def test_every_way_to_the_workers_from_outside_is_watched():
    targets = {
        part.target.rpartition(".")[2]
        for patches in FEATURE.seams
        for part in getattr(patches, "parts", (patches,))
        if getattr(part, "wrapper", "").startswith(weights.__name__)
    }
    assert targets == {"collective_rpc", "wake_up", "reset_prefix_cache"}


def test_a_failing_disk_writes_one_line_a_minute():
    now = [0.0]
    shown = FewerLines(lambda: now[0])

    def line(job):
        record = logging.LogRecord("x", 40, "f", 1, "Job %s failed: %s", (job, "full"), None)
        return record.getMessage() if shown.filter(record) else None

    assert line(1) == "Job 1 failed: full"
    assert [line(job) for job in range(2, 5)] == [None] * 3
    now[0] = 61
    assert line(5) == "Job 5 failed: full (and 3 more since the last such line)"
    assert line(6) is None
    logger = logging.Logger("of a tier")
    for _ in range(2):
        FewerLines.of(logger)
    assert len(logger.filters) == 1
