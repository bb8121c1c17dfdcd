"""The engines of a data parallel server, by vLLM's own classes, without an engine."""

import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from kvpatch import state
from kvpatch.patch import Transaction
from kvpatch.patches import data_parallel, fence
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.supported import release_of
from kvpatch.versions import installed

RELEASE = release_of(installed("vllm")[0])
ROWS = ("data_parallel.name", "fence.step")


@pytest.fixture(autouse=True)
def rows():
    """The rows of this module in force."""
    transaction = Transaction()
    for feature in (data_parallel.FEATURE, fence.FEATURE):
        transaction.apply_all(row for row in feature.at(RELEASE) if row.id in ROWS)
    assert sorted(one.patch.id for one in transaction.applied) == sorted(ROWS)
    yield
    transaction.revert_to(0)


def test_what_the_process_of_an_engine_runs_is_found_by_its_name():
    """A process that is spawned gets a name of its target, and looks it up."""
    from vllm.v1.engine.core import EngineCoreProc

    run = EngineCoreProc.run_engine_core
    assert pickle.loads(pickle.dumps(run)) is run
    assert run.__module__ == EngineCoreProc.__module__


def test_a_rank_that_is_idle_releases_pages_before_each_of_its_dummy_batches():
    """While others run, ranks of a mixture of experts step with batches that no row sees."""
    from vllm.v1.engine.core import DPEngineCoreProc

    order = []
    scheduler = SimpleNamespace(
        has_requests=lambda: False, has_unfinished_requests=lambda: False, connector=None
    )
    manager = SimpleNamespace(
        capture_physical_release_marker=lambda: 1,
        release_retired_pages_through=lambda marker: order.append("release"),
    )
    made = SimpleNamespace()
    state.attach(manager, Fenced(made, manager, scheduler))
    scheduler.kv_cache_manager = SimpleNamespace(
        block_pool=SimpleNamespace(kv_cache_manager=manager)
    )

    class Rank(DPEngineCoreProc):
        def __init__(self):
            self.scheduler = scheduler
            self.model_executor = SimpleNamespace(
                is_sleeping=False, execute_dummy_batch=lambda: order.append("dummy")
            )
            self.step_fn = self.step
            self.engines_running = True
            self.enable_fault_tolerance = False
            self.has_coordinator, self.dp_rank, self.pending_pause = True, 1, False
            self.eep_scaling_state = None
            self.rounds = 3

        def _handle_shutdown(self):
            self.rounds -= 1
            return self.rounds >= 0

        def _process_input_queue(self): ...

        def _maybe_publish_request_counts(self): ...

        def post_step(self, model_executed): ...

        def capture_iteration_details(self, output):
            return nullcontext()

        def _has_global_unfinished_reqs(self, local):
            return True

    with pytest.raises(SystemExit):
        Rank().run_busy_loop()
    assert order == ["release", "dummy"] * 3
