"""Pooling models: a state is plain vLLM's when the blocks of its prompt came from the CPU tier."""

from __future__ import annotations

import pytest

from harness.engines.fixtures import LAYOUTS
from harness.engines.oracle import Engine
from harness.engines.pooled import assert_comes_back
from harness.engines.runs import Run
from harness.engines.tiers import Serve


@LAYOUTS
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("simple", ["", "eager", "lazy"])
def test_pooled_states_of_restored_prompts_are_plain_vllms(
    serve: Serve, engine: Engine, simple: str, runner: str, contiguous: bool
) -> None:
    assert_comes_back(serve, engine, Run(runner=runner, simple=simple, contiguous=contiguous))
