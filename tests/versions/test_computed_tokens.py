"""The log-probabilities of a prompt whose blocks are in the CPU tier: all of it is computed."""

from dataclasses import replace

import pytest

from harness import releases
from harness.engines.oracle import PLAIN
from harness.engines.runs import Finished, Run

RUN = Run(rounds=("all", "scored"))
CONNECTORS = {"": ("0.16", "0.24"), "eager": ("0.22", "0.30")}
EVERY = pytest.mark.parametrize(
    ("simple", "vllm"),
    [
        (simple, vllm)
        for simple, span in CONNECTORS.items()
        for vllm in releases.with_own_runs(*span)
    ],
)


def gap(ours: Finished, plain: Finished) -> float:
    """The widest gap between log-probabilities of the prompts of both."""
    pairs = [
        (own, other)
        for mine, theirs in zip(ours.round(1), plain.round(1), strict=True)
        for own, other in zip(mine["prompt"], theirs["prompt"], strict=True)
    ]
    assert len(pairs) > 4 * 600
    return max(abs(own - other) for own, other in pairs)


@EVERY
def test_a_prompt_in_the_tier_is_scored_as_plain_vllm_does(engine, simple, vllm):
    run = replace(RUN, simple=simple, vllm=vllm, asynchronous=True)
    ours = engine(run)
    assert gap(ours, engine(replace(PLAIN, rounds=RUN.rounds, vllm=vllm))) < 1e-4


@pytest.mark.parametrize(
    ("simple", "vllm", "rows"),
    [
        ("", "0.23.0", ("offloading.computed_tokens",)),
        # The first is of lazy mode, on top of the other.
        ("eager", "0.28.0", ("simple_offload.match", "simple_offload.computed_tokens")),
    ],
)
def test_without_the_row_the_prompt_is_scored_by_memory_that_nobody_wrote(
    engine, simple, vllm, rows
):
    run = replace(RUN, simple=simple, vllm=vllm, asynchronous=True, revert=rows)
    ours = engine(run)
    plain = engine(replace(PLAIN, rounds=RUN.rounds, vllm=vllm))
    assert ours.code or gap(ours, plain) > 0.1
