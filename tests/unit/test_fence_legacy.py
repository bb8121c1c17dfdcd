"""The fence before vLLM 0.25, and up to 0.20 with transfers that belong to requests."""

from types import SimpleNamespace

import pytest
from fakes import OffloadingConnector, known, planner, scheduler

from kvpatch import state
from kvpatch.patches.fence import legacy
from kvpatch.patches.fence.fence import Fence, Transfer
from kvpatch.patches.fence.hooks import Fenced


def range_of(page):
    return page * 10, page * 10 + 10


def pair(source, destination):
    return SimpleNamespace(block_ids=source), SimpleNamespace(block_ids=destination)


class Engine:
    """As much of a scheduler and its connector as the wrappers look at; pages of ten blocks."""

    def __init__(self, workers=1, fenced=True):
        self.fence = Fence(range_of, workers)
        self.planner = SimpleNamespace()
        manager = SimpleNamespace(capture_physical_release_marker=lambda: 1)
        connector = OffloadingConnector(connector_scheduler=self.planner)
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


def test_every_block_of_a_transfer_is_named():
    engine = Engine()
    engine.build(stores={"a": pair([11, 21, 31], [90])}, loads={"b": pair([91], [41, 51])})
    assert engine.held(1, 2, 3, 4, 5, 6) == [1, 2, 3, 4, 5]


def test_all_stores_of_all_preempted_requests_end_with_that_step():
    engine = Engine(workers=2)
    engine.run(engine.build(stores={"a": pair([11], [90]), "b": pair([21], [91])}))
    engine.run(engine.build(stores={"a": pair([31], [92])}))
    engine.run(engine.build(loads={"a": pair([93], [41])}))
    engine.run(engine.build(preempted={"a", "b", "other"}))
    assert engine.held(1, 2, 3, 4) == [4]  # a load does not end with a preemption


def test_a_step_is_reported_before_vllm_handles_it():
    engine = Engine()
    engine.run(engine.build(stores={"a": pair([11], [90])}))
    output = engine.build(preempted={"a"})
    seen = legacy.around_step_output(
        lambda given: dict(engine.fence.transfers), engine.scheduler, (output,), {}
    )
    assert seen == {}
    engine.run(output)  # once more, to no effect


def test_a_step_of_which_nothing_was_recorded_ends_nothing():
    engine = Engine()
    engine.build(stores={"a": pair([11], [90])})
    engine.run(SimpleNamespace(kv_connector_metadata=SimpleNamespace()))
    assert engine.held(1) == [1]


def test_a_report_is_heard_before_vllm_handles_it_and_its_result_is_vllms():
    engine = Engine()
    engine.build(stores={"a": pair([11], [90])})
    output = SimpleNamespace(finished_sending={"a"}, finished_recving=None)
    seen = legacy.around_worker_output_by_request(
        lambda given: dict(engine.fence.transfers), engine.planner, (output,), {}
    )
    assert seen == {}


def test_the_newest_retirement_is_the_steps():
    engine = Engine()
    state.find(engine.planner, Fenced).manager.capture_physical_release_marker = lambda: 4
    engine.build()
    assert engine.fence.split([(4, [1]), (5, [2])], True) == ([1], [(5, [2])])


# Up to 0.24


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


def test_every_pair_of_a_step_is_named_for_its_own_request():
    def job(request, source, destination):
        return SimpleNamespace(req_id=request, transfer_spec=pair(source, destination))

    fence, planner = Fence(range_of, workers=1), SimpleNamespace()
    manager = SimpleNamespace(capture_physical_release_marker=lambda: 7)
    state.attach(planner, Fenced(fence, manager, None))
    meta = SimpleNamespace(
        store_jobs={1: job("a", [11], [90]), 2: job("b", [21], [91])},
        load_jobs={3: job("c", [92], [31]), 4: job("d", [93], [41])},
    )
    legacy.around_build_of_pairs(lambda: meta, planner, (), {})
    assert fence.transfers == {
        1: Transfer("a", (11,)),
        2: Transfer("b", (21,)),
        3: Transfer("c", (31,)),
        4: Transfer("d", (41,)),
    }


def test_pairs_without_a_fence_are_left_alone():
    meta = SimpleNamespace(store_jobs={}, load_jobs={})
    assert legacy.around_build_of_pairs(lambda: meta, SimpleNamespace(), (), {}) is meta


def windows(held, blocks, factor=1):
    """A planner with a fence, two groups with windows, and requests that know these blocks."""
    made = planner(blocks, factor=factor)
    state.attach(made, Fenced(Fence(range_of, 1), None, scheduler(held)))
    return made


def test_freed_blocks_of_every_request_and_window_are_left_out():
    planner = windows(
        {"a": [True, True, False], "b": [True, True, True, True]},
        {"a": [11, 12, 13, 14], "b": [21, 22, 23], "gone": [31]},
    )
    assert legacy.before_build(lambda *args: args, planner, ("step",), {}) == ("step",)
    # What is stored already, and what has no block yet, is let be.
    assert known(planner, "a") == [[11, 12, 13, 14], [11, 0, 13, 14], [11, 0, 13, 14]]
    assert known(planner, "b") == [[21, 22, 23], [21, 0, 0], [21, 0, 0]]
    assert known(planner, "gone") == [[31], [31], [31]]


def test_chunks_of_several_blocks_begin_at_their_first_block():
    planner = windows({"a": [True] * 4}, {"a": [11, 12, 13, 14]}, factor=2)
    legacy.before_build(lambda: None, planner, (), {})
    assert known(planner, "a")[1] == [11, 12, 0, 0]


def test_windows_are_looked_at_before_vllm_plans():
    planner = windows({"a": [True, True]}, {"a": [11, 12]})
    assert legacy.before_build(lambda: list(known(planner, "a")[2]), planner, (), {}) == [11, 0]


def test_a_planner_without_a_fence_or_without_windows_is_left_alone():
    assert legacy.before_build(lambda: "meta", SimpleNamespace(), (), {}) == "meta"
    planner = SimpleNamespace(_sliding_window_groups=())
    state.attach(planner, Fenced(None, None, None))
    assert legacy.before_build(lambda: "meta", planner, (), {}) == "meta"
