"""The fence between vLLM's scheduler and kvcached's page manager, without either of them.

And the wait for the workers before pages are unmapped: its limit, and who must have answered.
"""

from types import SimpleNamespace

import pytest
from fakes import OffloadingConnector, known, module, planner

from kvpatch import state
from kvpatch.patches.fence import hooks
from kvpatch.patches.fence.fence import Fence, Transfer
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.upstream import kvcached_api


def range_of(page):
    return page * 10, page * 10 + 10


class Manager:
    """kvcached's manager of pages: marker 0 unmaps what was retired at epoch 0."""

    def __init__(self, *retired):
        self._retired_pages = list(retired)
        self.unmapped = []
        self.markers = []
        self.epoch = max((epoch for epoch, _ in retired), default=0)

    def capture_physical_release_marker(self):
        return self.epoch

    def let_go(self, marker):
        self.markers.append(marker)
        self.unmapped += [
            p for epoch, pages in self._retired_pages if epoch <= marker for p in pages
        ]
        self._retired_pages = [one for one in self._retired_pages if one[0] > marker]

    def release_retired_pages_through(self, marker):
        hooks.around_release(self.let_go, self, (marker,), {})


class Engine:
    """As much of an ``EngineCore`` as the hooks look at."""

    def __init__(self, manager, blocks=None, workers=1):
        self.planner, self.unfinished, self.finished = planner(blocks or {}), False, False
        connector = OffloadingConnector(connector_scheduler=self.planner)
        self.scheduler = SimpleNamespace(
            connector=connector,
            has_unfinished_requests=lambda: self.unfinished,
            has_finished_requests=lambda: self.finished,
            kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(kv_cache_manager=manager)),
        )
        self.rpcs, self.answers = [], [True] * workers
        self.model_executor = SimpleNamespace(collective_rpc=self.collective_rpc)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=workers))

    def collective_rpc(self, method, timeout=None):
        self.rpcs.append((method, timeout))
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers

    def install(self):
        called = []
        hooks.around_install(lambda *a, **k: called.append((a, k)), self, (1,), {"two": 2})
        assert called == [((1,), {"two": 2})]
        return state.find(kvcached_api.manager_of(self), Fenced)


at_once = []  # managers that need not wait for the device


@pytest.fixture(autouse=True)
def pages(monkeypatch):
    monkeypatch.setenv("KVCACHED_MAX_RESERVED_PAGES", "0")  # what may go goes at once
    monkeypatch.setattr(kvcached_api, "blocks_of_page", lambda manager, page: range_of(page))
    monkeypatch.setattr(kvcached_api, "unmap_at_once", lambda manager: at_once.append(manager))
    at_once.clear()
    module(monkeypatch, "vllm", envs=SimpleNamespace(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=300))


def engine(*retired, blocks=None, workers=1):
    made = Engine(Manager(*retired), blocks, workers)
    made.manager = kvcached_api.manager_of(made)
    made.fenced = made.install()
    return made


def test_the_fence_waits_for_all_ranks_and_the_manager_leaves_unmapping_to_it():
    one = engine(workers=3)
    fence = one.fenced.fence
    assert fence.workers == 3
    assert not fence.pinned
    assert fence.blocks_of_page(2) == (20, 30)
    assert state.find(one.planner, Fenced) is one.fenced
    assert (one.fenced.manager, one.fenced.scheduler) == (one.manager, one.scheduler)
    assert at_once == [one.manager]
    assert one.manager.defer_physical_release is True
    one.manager.physical_release_barrier()
    assert one.rpcs == [(hooks.compute_barrier, 300)]  # as long as a step may take


def test_a_worker_that_hangs_ends_the_wait():
    one = engine()
    one.answers = TimeoutError("RPC call to compute_barrier timed out.")
    with pytest.raises(RuntimeError) as ended:
        one.manager.physical_release_barrier()
    assert str(ended.value) == (
        "a worker did not finish its computation within 300 s "
        "(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS); its pages cannot be unmapped"
    )


@pytest.mark.parametrize("answers", [[True], [True, False], [True, None], []])
def test_nothing_is_unmapped_unless_every_worker_has_answered(answers):
    one = engine(workers=2)
    one.answers = answers
    with pytest.raises(RuntimeError, match="2 workers had to finish before pages are unmapped"):
        one.manager.physical_release_barrier()


def test_an_engine_without_a_connector_has_no_fence():
    one = Engine(Manager())
    one.scheduler.connector = None
    assert one.install() is None
    assert hooks.fence_of(one) is None
    manager = kvcached_api.manager_of(one)
    assert not hasattr(manager, "defer_physical_release")
    manager._retired_pages = [(1, [4])]
    hooks.release_now(one)
    assert manager.markers == []  # kvcached's own order
    manager.release_retired_pages_through(7)
    assert manager.markers == [7]
    assert hooks.after_reset(lambda: True, one, (), {}) is True  # nothing is stepped


@pytest.mark.parametrize(
    ("device", "waits"),
    [
        (None, False),
        (SimpleNamespace(type="cpu"), False),
        (SimpleNamespace(type="cuda"), True),
        (SimpleNamespace(type="npu"), True),
    ],
)
def test_a_worker_waits_for_its_computation_alone(monkeypatch, device, waits):
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("computed"))
    streams = SimpleNamespace(current_stream=lambda of: stream if of is device else None)
    of = getattr(device, "type", "cuda")  # torch.npu is torch_npu's
    module(monkeypatch, "torch", **{of: streams})
    assert hooks.compute_barrier(SimpleNamespace(device=device)) is True
    assert waited == ["computed"] * waits


def job(request, source, destination):
    return SimpleNamespace(
        req_id=request,
        src_spec=SimpleNamespace(block_ids=source),
        dst_spec=SimpleNamespace(block_ids=destination),
    )


def build(one, stores, loads):
    meta = SimpleNamespace(store_jobs=stores, load_jobs=loads)
    assert hooks.around_build(lambda output: meta, one.planner, ("step",), {}) is meta


def report(one, jobs):
    meta = None if jobs is None else SimpleNamespace(completed_jobs=jobs)
    output = SimpleNamespace(kv_connector_worker_meta=meta)
    assert hooks.around_worker_output(lambda given: given, one.planner, (output,), {}) is output


def test_a_step_names_the_blocks_that_its_copies_touch_on_the_device():
    one = engine((3, [1, 2, 5]))
    build(one, {1: job("a", [11, 12], [90])}, {2: job("b", [91], [25]), 3: job("c", [92], [26])})
    assert one.fenced.fence.transfers == {
        1: Transfer("a", (11, 12)),
        2: Transfer("b", (25,)),
        3: Transfer("c", (26,)),
    }
    assert one.fenced.fence.split([(3, [1, 2, 5, 9])], True) == ([5, 9], [(3, [1, 2])])
    assert one.fenced.fence.split([(4, [5])], True) == ([], [(4, [5])])  # freed after the plan


def test_one_ranks_report_is_not_all_ranks():
    one = engine((1, [1, 2]), workers=2)
    build(one, {1: job("a", [11], [90]), 2: job("a", [21], [91])}, {})
    report(one, {1: 1, 2: 1})
    assert set(one.fenced.fence.transfers) == {1, 2}
    report(one, None)
    report(one, {1: 1})
    assert set(one.fenced.fence.transfers) == {2}
    report(one, {2: 1})
    assert one.fenced.fence.transfers == {}
    build(one, {3: job("a", [11], [90])}, {})
    report(one, {3: 2})  # of all ranks at once, summed by vLLM
    assert one.fenced.fence.transfers == {}


def test_reports_are_heard_before_vllm_handles_them():
    """vLLM frees blocks in that call; the fence must know the copy's end by then."""
    one = engine()
    build(one, {1: job("a", [11], [90])}, {})
    output = SimpleNamespace(kv_connector_worker_meta=SimpleNamespace(completed_jobs={1: 1}))
    seen = hooks.around_worker_output(
        lambda connector_output: dict(one.fenced.fence.transfers),
        one.planner,
        (),
        {"connector_output": output},
    )
    assert seen == {}


def test_a_planner_without_a_fence_is_left_alone():
    planner = SimpleNamespace()
    meta = object()
    assert hooks.around_build(lambda: meta, planner, (), {}) is meta
    assert hooks.around_worker_output(lambda output: output, planner, (meta,), {}) is meta
    assert hooks.around_pending_work(lambda: False, planner, (), {}) is False
    assert hooks.around_pending_work(lambda: True, planner, (), {}) is True


def test_the_engine_steps_as_long_as_a_page_is_held():
    one = engine()
    assert hooks.around_pending_work(lambda: False, one.planner, (), {}) is False
    assert hooks.around_pending_work(lambda: True, one.planner, (), {}) is True
    one.fenced.fence.split([(9, [1])], True)
    assert hooks.around_pending_work(lambda: False, one.planner, (), {}) is True


def test_held_pages_stay_on_kvcacheds_list_and_others_go():
    one = engine((1, [1, 2]), (2, [3]), (5, [4]))
    one.unfinished = True
    build(one, {1: job("a", [21], [90])}, {})
    one.manager._retired_pages.append((6, [7]))  # after the plan
    one.manager.epoch = 6
    seen = []
    one.fenced.on_release += [lambda pages: seen.append(list(pages)), lambda pages: seen.append([])]
    hooks.release_now(one)
    assert one.manager.markers == [0]
    assert one.manager.unmapped == [1, 3, 4]
    assert one.manager._retired_pages == [(1, [2]), (6, [7])]
    assert seen == [[1, 3, 4], []]
    report(one, {1: 1})
    hooks.release_now(one)
    assert one.manager.unmapped == [1, 3, 4, 2]
    assert one.manager._retired_pages == [(6, [7])]
    build(one, {}, {})
    hooks.release_now(one)
    assert one.manager.unmapped == [1, 3, 4, 2, 7]
    assert one.manager._retired_pages == []


def test_nothing_to_let_go_leaves_the_list_as_it_is():
    one = engine((1, [1]))
    one.unfinished = True
    one.manager.epoch = 1
    hooks.release_now(one)
    assert one.manager._retired_pages == [(1, [1])]
    assert one.manager.unmapped == []
    one.manager._retired_pages = None  # before anything was retired
    hooks.release_now(one)
    assert one.manager._retired_pages == []


@pytest.mark.parametrize(
    ("unfinished", "finished", "held"),
    [(True, False, True), (False, True, True), (True, True, True), (False, False, False)],
)
def test_a_store_of_a_finished_request_can_still_be_planned(unfinished, finished, held):
    """vLLM plans the stores of requests that have finished in the step after."""
    one = engine((1, [1]))
    one.unfinished, one.finished = unfinished, finished
    hooks.release_now(one)
    assert one.manager.unmapped == ([] if held else [1])


def test_a_release_makes_the_planner_forget_the_blocks_of_every_page():
    """A request with a sliding window keeps ids of blocks that left it, and stores them later."""
    blocks = {"a": [5, 11, 19, 20, 30], "b": [10, 39, 40], "c": []}
    one = engine((1, [1, 3]), (2, [5]), blocks=blocks)
    one.unfinished = True
    build(one, {1: job("z", [52], [90])}, {})
    hooks.release_now(one)
    assert one.manager.unmapped == [1, 3]
    assert known(one.planner, "a") == [[5, 11, 19, 20, 30], [5, 0, 0, 20, 0], [5, 0, 0, 20, 0]]
    assert known(one.planner, "b") == [[10, 39, 40], [0, 0, 40], [0, 0, 40]]


def test_the_planner_forgets_before_the_pages_are_unmapped():
    one = engine((1, [1]), blocks={"a": [11]})
    seen = []
    hooks.around_release(
        lambda marker: seen.append(known(one.planner, "a")[1][0]), one.manager, (1,), {}
    )
    assert seen == [0]


def test_a_step_releases_after_it_ran():
    one = engine((1, [1]))
    order = []

    def step(*args):
        order.append(list(one.manager.unmapped))
        return ("ran", *args)

    assert hooks.after_step(step, one, ("x",), {}) == ("ran", "x")
    assert order == [[]]
    assert one.manager.unmapped == [1]


class Stepping(Engine):
    """An engine in the caller's process, in which a copy ends after two steps."""

    def step_fn(self):
        self.steps += 1
        if self.steps == 2:
            report(self, {1: 1})
        hooks.release_now(self)


@pytest.mark.parametrize(
    ("busy_loop", "unfinished", "steps"), [(False, False, 2), (True, False, 0), (False, True, 0)]
)
def test_a_reset_steps_an_engine_that_nobody_steps_until_no_page_is_held(
    busy_loop, unfinished, steps
):
    one = Stepping(Manager((1, [1]), (2, [2])))
    one.steps, one.unfinished = 0, unfinished
    if busy_loop:
        one.run_busy_loop = lambda: None
    one.install()
    build(one, {1: job("a", [11], [90])}, {})
    reset = hooks.after_reset(lambda *args: ("reset", *args), one, ("x",), {})
    assert reset == ("reset", "x")
    assert one.steps == steps
    assert kvcached_api.manager_of(one).unmapped == ([2, 1] if steps else [2])


@pytest.mark.parametrize("connector", [True, False])
def test_the_wait_for_every_copy_is_left_out_only_with_a_connector(monkeypatch, connector):
    has = {"has_kv_transfer_group": lambda: connector}
    module(monkeypatch, "vllm.distributed.kv_transfer", **has)
    waited = []
    hooks.skip_device_wide_wait(lambda *args: waited.append(args), None, ("x",), {})
    assert waited == ([] if connector else [("x",)])


def test_fences_count_what_they_held():
    fence = Fence(range_of, workers=1)
    fence.split([(1, [1, 2])], can_plan=True)
    fence.plan([(1, Transfer("a", (20,)))], epoch=1)
    assert fence.split([(1, [1, 2])], can_plan=True) == ([1], [(1, [2])])
    fence.plan([], epoch=1)
    fence.report(1, 1)
    assert fence.split([(1, [2, 3])], can_plan=True) == ([2, 3], [])
    counts = fence.counters
    assert (counts.released, counts.held_for_plan, counts.held_for_transfer) == (3, 2, 1)
    assert counts.longest_hold == 2


def test_a_fence_begins_at_nothing_and_keeps_nothing_of_a_transfer_that_ended():
    fence = Fence(range_of, workers=2)
    assert vars(fence.counters) == dict.fromkeys(
        ("released", "held_for_plan", "held_for_transfer", "longest_hold"), 0
    )
    assert not fence.pinned
    for _ in range(2):  # the second of the same number needs both reports again
        fence.plan([(1, Transfer("a", (11, 12)))], epoch=1)
        fence.report(1, 1)
        assert fence.split([(1, [1])], can_plan=True) == ([], [(1, [1])])
        fence.report(1, 1)
        assert fence.split([(1, [1])], can_plan=True) == ([1], [])
    fence.split([(2, [5])], can_plan=True)
    assert fence.split([(2, [5])], can_plan=False) == ([5], [])
    assert fence.counters.longest_hold == 0  # all within one step
