"""Allocations that fail in the middle, because a neighbour took the last page meanwhile."""

from dataclasses import replace

import pytest

from harness import releases
from harness.engines.oracle import PLAIN, assert_same
from harness.engines.runs import Run

ROUNDS = ("long", "long")
# The model has two groups, so that the blocks of one are there when the other has none: of
# four times that blocks are taken, the last is for the second group.
RUN = Run(model="sliding", rounds=ROUNDS, exhaust=4)
EVERY = pytest.mark.parametrize(
    ("vllm", "runner"),
    [
        *((vllm, "v1") for vllm in releases.with_own_runs("0.16", before="0.29")),
        *((vllm, runner) for vllm in releases.between("0.32") for runner in ("v1", "v2")),
    ],
)


@EVERY
def test_a_failed_allocation_leaves_nothing_behind(engine, vllm, runner):
    run = replace(RUN, vllm=vllm, runner=runner)
    ours = engine(run)
    assert_same(
        ours, engine(replace(PLAIN, model=run.model, rounds=ROUNDS, vllm=vllm, runner=runner))
    )
    assert ours.result["exhaustion"]["failed"] > 0
    assert ours.result["exhaustion"]["leaked"] == 0


@pytest.mark.parametrize("vllm", ["0.19.1", "0.27.1"])
def test_without_the_rollback_the_next_try_ends_the_engine(engine, vllm):
    ours = engine(replace(RUN, vllm=vllm, revert=("elastic_memory.rollback",)))
    assert "KV on elastic memory: yes" in ours.log
    assert ours.code
    assert "assert len(new_computed_blocks) == 0" in ours.log
