"""Pooling models: a state is plain vLLM's when the blocks of its prompt came from the CPU tier."""

import pytest

from harness.engines.pooled import assert_comes_back
from harness.engines.runs import Run


# Every two values of the three meet.
@pytest.mark.parametrize(
    ("simple", "runner", "contiguous"),
    [
        ("", "v1", True),
        ("", "v2", False),
        ("eager", "v1", False),
        ("eager", "v2", True),
        ("lazy", "v1", True),
        ("lazy", "v2", False),
    ],
)
def test_pooled_states_of_restored_prompts_are_plain_vllms(
    serve, engine, simple, runner, contiguous
):
    assert_comes_back(serve, engine, Run(runner=runner, simple=simple, contiguous=contiguous))
