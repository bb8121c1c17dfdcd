"""Pooling models on the other releases that start them, as on the newest in the lane long."""

import pytest

from harness import releases
from harness.engines.fixtures import LAYOUTS
from harness.engines.pooled import assert_comes_back
from harness.engines.runs import Run
from kvpatch.patches.offloading.model_rules import POOLED
from kvpatch.supported import validated
from kvpatch.upstream import connectors

OTHERS = [
    (vllm, simple)
    for name, simple in ((connectors.OFFLOADING, ""), (connectors.SIMPLE, "eager"))
    for vllm in validated(POOLED[name])
    if vllm != releases.newest_built()
]


@LAYOUTS
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(("vllm", "simple"), OTHERS)
def test_pooled_states_of_restored_prompts_are_plain_vllms(
    serve, engine, vllm, simple, runner, contiguous
):
    run = Run(vllm=vllm, runner=runner, simple=simple, contiguous=contiguous)
    assert_comes_back(serve, engine, run)
