"""The fence before vLLM 0.25, for what an engine sees seldom: several groups, jobs and ranks."""

from types import SimpleNamespace

from test_fence_legacy import Engine, pair

from kvpatch import state
from kvpatch.patches.fence import legacy
from kvpatch.patches.fence.fence import Fence, Transfer
from kvpatch.patches.fence.hooks import Fenced


def range_of(page):
    return page * 10, page * 10 + 10


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


def windows(held, known, factor=1):
    """A planner with two windowed groups, of requests with the blocks ``known``."""

    def blocks(request):
        return [SimpleNamespace(is_null=null) for null in held[request]]

    groups = [
        SimpleNamespace(req_to_blocks={request: blocks(request) for request in held})
        for _ in range(3)
    ]
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=groups))
    )
    planner = SimpleNamespace(
        _sliding_window_groups=(1, 2),
        _req_status={
            request: SimpleNamespace(
                group_states=[
                    SimpleNamespace(next_stored_block_idx=1, block_ids=list(ids)) for _ in range(3)
                ]
            )
            for request, ids in known.items()
        },
        config=SimpleNamespace(
            block_size_factor=factor,
            kv_group_configs=[SimpleNamespace(group_idx=n) for n in range(3)],
        ),
    )
    state.attach(planner, Fenced(Fence(range_of, 1), None, scheduler))
    return planner


def known(planner, request):
    return [group.block_ids for group in planner._req_status[request].group_states]


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


# Up to 0.20


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
