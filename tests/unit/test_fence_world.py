"""Nothing is lost whatever users, operators, copies and workers do, in every mode."""

import pytest

pytest.importorskip("hypothesis")  # of .venv; scripts/pythons is without

from fence_world import MODES, Mode, World
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvpatch.patches.fence.fence import Fence

STEPS = 50
EXAMPLES = 200  # of a mode: 50 x 200 x 12 modes is more than 100,000 steps
INDEX = st.integers(0, 7)


class Machine(RuleBasedStateMachine):
    """Drives a world; a loss fails the rule in which it shows."""

    mode = MODES[0]
    fence = Fence
    forget = True
    seen = {}  # noqa: RUF012

    @initialize(seed=st.integers(0, 2**32), tier_full=st.booleans())
    def start(self, seed, tier_full):
        self.world = World(self.mode, self.fence, self.forget, seed)
        self.world.tier_full = tier_full

    def check(self):
        """Take count, and see to it that there is always something to schedule."""
        if len(self.world.requests) < 2:
            self.world.add(self.world.random.randrange(1, 4), from_tier=False)
        self.seen["steps"] += 1
        assert not self.world.lost

    @rule(blocks=st.integers(1, 4), from_tier=st.booleans())
    def add(self, blocks, from_tier):
        self.world.add(blocks, from_tier)
        self.check()

    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self.world.step()
            self.check()

    @rule(rank=INDEX, count=st.integers(1, 3))
    def copies_end(self, rank, count):
        self.world.end_copies(rank, count)
        self.check()

    @rule(rank=INDEX)
    def a_worker_runs_ahead(self, rank):
        worker = self.world.workers[rank % len(self.world.workers)]
        if worker.queue:
            worker.execute()
        self.check()

    @rule(index=INDEX)
    def a_request_reaches_its_end(self, index):
        self.world.stop(index)
        self.check()

    @rule(index=INDEX)
    def abort(self, index):
        self.world.abort(index)
        self.check()

    @precondition(lambda self: self.mode.window)
    @rule(index=INDEX, blocks=st.integers(1, 3))
    def the_window_moves(self, index, blocks):
        for _ in range(blocks):
            self.world.skip(index)
        self.check()

    @rule(count=st.sampled_from((1, 2, 4, 99)))
    def evict(self, count):
        self.world.evict(count)
        self.check()

    @rule()
    def the_tier_fills_or_empties(self):
        self.world.tier_full = not self.world.tier_full
        self.check()

    def teardown(self):
        if not hasattr(self, "world") or self.world.lost:
            return
        self.world.rest()
        assert not self.world.lost
        self.seen["jobs"] += self.world.job_count
        self.seen["unmapped"] += self.world.unmapped
        assert not self.world.mapped
        assert not self.world.retired
        assert not self.world.fence.transfers
        assert self.world.fence.holding == 0


class BlindToPlans(Fence):
    """Takes it that nothing freed can still be planned for."""

    def split(self, retired, can_plan):
        return super().split(retired, can_plan=False)


class BlindToTransfers(Fence):
    """Never hears of a transfer."""

    def plan(self, jobs, epoch):
        super().plan([], epoch)


class DeafToWorkers(Fence):
    """Takes a transfer for ended when the first worker says so."""

    def report(self, job_id, workers):
        super().report(job_id, self.workers)


def explore(mode, examples, fence=Fence, forget=True, number=None, **more):
    """Explore a mode, or a seed of it; return how many steps were made and pages unmapped."""
    machine = type("Machine", (Machine,), {"mode": mode, "fence": fence, "forget": forget})
    machine.seen = seen = {"steps": 0, "jobs": 0, "unmapped": 0}
    seed(number)(machine)  # None is none
    run_state_machine_as_test(
        machine,
        settings=settings(
            derandomize=True,
            deadline=None,
            database=None,
            max_examples=examples,
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            **more,
        ),
    )
    return seen


def must_lose(mode, steps, seeds=(), **broken):
    """Explore at most so many steps, without shrinking what is found; seeds that lose first."""
    with pytest.raises(AssertionError, match=r"read (unmapped|newly mapped|\()"):
        for number in seeds:
            explore(mode, EXAMPLES, number=number, phases=[Phase.generate], **broken)
        explore(mode, steps // STEPS, phases=[Phase.generate], **broken)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_with_the_fence_nothing_is_lost_and_every_page_comes_back(mode):
    seen = explore(mode, EXAMPLES)
    assert seen["steps"] * len(MODES) >= 100_000
    # Hypothesis tries numbers of the modules it finds loaded, so that these vary with them.
    assert seen["jobs"] > 500
    assert seen["unmapped"] > 500


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_unmapping_at_the_free_loses_data_within_1000_steps(mode):
    must_lose(mode, 1000, fence=None)


@pytest.mark.parametrize(
    ("broken", "mode"),
    [
        ({"fence": BlindToTransfers}, Mode(False, False, False, 1, False)),
        ({"fence": BlindToPlans}, Mode(False, False, True, 1, False)),
        ({"fence": BlindToPlans}, Mode(True, True, True, 1, False)),
        ({"fence": DeafToWorkers}, Mode(False, False, False, 2, False)),
        ({"forget": False, "seeds": (5, 10, 7)}, Mode(False, False, False, 1, True)),
    ],
    ids=str,
)
def test_each_rule_of_the_fence_is_needed(broken, mode):
    must_lose(mode, 200_000, **broken)
