"""The fence before vLLM 0.25, and up to 0.20 with transfers that belong to requests."""

from types import SimpleNamespace

import pytest

from kvpatch import state
from kvpatch.patches.fence import legacy
from kvpatch.patches.fence.fence import Fence
from kvpatch.patches.fence.hooks import Fenced


def pair(source, destination):
    return SimpleNamespace(block_ids=source), SimpleNamespace(block_ids=destination)


class Engine:
    """As much of a scheduler and its connector as the wrappers look at; pages of ten blocks."""

    def __init__(self, workers=1, fenced=True):
        self.fence = Fence(lambda page: (page * 10, page * 10 + 10), workers)
        self.planner = SimpleNamespace()
        manager = SimpleNamespace(capture_physical_release_marker=lambda: 1)
        connector = type("OffloadingConnector", (), {"connector_scheduler": self.planner})()
        self.scheduler = SimpleNamespace(connector=connector)
        if fenced:
            state.attach(self.planner, Fenced(self.fence, manager, self.scheduler))

    def build(self, stores=None, loads=None, preempted=None):
        meta = SimpleNamespace(reqs_to_store=stores or {}, reqs_to_load=loads or {})
        output = SimpleNamespace(preempted_req_ids=preempted)
        made = legacy.around_build_by_request(
            lambda scheduler_output: meta if scheduler_output is output else None,
            self.planner,
            (output,),
            {},
        )
        assert made is meta
        output.kv_connector_metadata = meta
        return output

    def run(self, output):
        said = legacy.around_step_output(
            lambda *args: ("ran", *args), self.scheduler, (output, "tokens"), {}
        )
        assert said == ("ran", output, "tokens")

    def report(self, sent=None, received=None):
        output = SimpleNamespace(finished_sending=sent, finished_recving=received)
        legacy.around_worker_output_by_request(lambda given: None, self.planner, (output,), {})

    def held(self, *pages):
        return [page for _, held in self.fence.split([(1, list(pages))], True)[1] for page in held]

    def steps(self, vllm_asks=False):
        return legacy.around_has_requests_by_request(lambda: vllm_asks, self.scheduler, (), {})


@pytest.mark.parametrize("workers", [1, 2])
def test_a_requests_stores_end_together_when_they_are_reported(workers):
    engine = Engine(workers)
    engine.run(engine.build(stores={"a": pair([11], [90]), "b": pair([31], [91])}))
    engine.run(engine.build(stores={"a": pair([22], [92])}))
    assert engine.held(0, 1, 2, 3, 9) == [1, 2, 3]
    engine.report(sent={"a"})
    assert engine.held(1, 2, 3) == [3]
    engine.report(sent={"b"})
    assert engine.held(1, 2, 3) == []


def test_a_load_ends_when_it_is_reported_and_not_with_a_store():
    engine = Engine()
    engine.run(engine.build(loads={"a": pair([90], [11])}))
    engine.report(sent={"a"})
    assert engine.held(1, 9) == [1]
    engine.report(received={"a"})
    assert engine.held(1, 9) == []


def test_a_preempted_requests_stores_end_with_the_step_that_preempted_it():
    engine = Engine()
    engine.run(engine.build(stores={"a": pair([11], [90]), "b": pair([31], [91])}))
    preempting = engine.build(preempted={"a"})
    # Planned before the workers have run that step, as async scheduling does.
    later = engine.build(stores={"a": pair([22], [92])})
    assert engine.held(1, 2, 3) == [1, 2, 3]
    engine.run(preempting)
    assert engine.held(1, 2, 3) == [2, 3]
    engine.run(later)
    assert engine.held(1, 2, 3) == [2, 3]
    engine.report(sent={"a", "b"})
    assert engine.held(1, 2, 3) == []


def test_the_engine_steps_while_a_transfer_runs_or_a_page_is_held_back():
    engine = Engine()
    assert not engine.steps()
    assert engine.steps(vllm_asks=True)
    engine.build(stores={"a": pair([11], [90])})
    assert engine.steps()
    engine.report(sent={"a"})
    assert not engine.steps()
    engine.fence.split([(2, [1])], True)  # freed after the newest step was built
    assert engine.steps()


def test_nothing_is_noted_without_a_fence():
    engine = Engine(fenced=False)
    output = engine.build(stores={"a": pair([11], [90])})
    engine.run(output)
    engine.report(sent={"a"}, received={"b"})
    assert not engine.steps()
    engine.scheduler.connector = None
    engine.run(output)
    assert not engine.steps()


# Up to 0.24


class OffloadingConnector(SimpleNamespace):
    """vLLM's, by its name."""


@pytest.mark.parametrize("in_multi", [False, True], ids=["alone", "inside a MultiConnector"])
@pytest.mark.parametrize(
    ("vllm_asks", "holding", "asked"), [(False, 0, False), (True, 0, True), (False, 2, True)]
)
def test_an_engine_steps_while_a_page_is_held_back(vllm_asks, holding, asked, in_multi):
    planner = SimpleNamespace()
    state.attach(planner, Fenced(SimpleNamespace(holding=holding), None, None))
    connector = OffloadingConnector(connector_scheduler=planner)
    if in_multi:
        connector = SimpleNamespace(_connectors=[SimpleNamespace(), connector])
    scheduler = SimpleNamespace(connector=connector)
    assert legacy.around_has_requests(lambda: vllm_asks, scheduler, (), {}) is asked


def test_an_engine_without_a_connector_steps_as_it_did():
    scheduler = SimpleNamespace(connector=None)
    assert legacy.around_has_requests(lambda: True, scheduler, (), {}) is True
    assert legacy.around_has_requests(lambda: False, scheduler, (), {}) is False
