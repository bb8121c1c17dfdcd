"""Models with latent attention and with state-space layers on Model Runner V2: the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.engines.fixtures import LAYOUTS
from harness.engines.oracle import assert_same
from harness.engines.runs import Finished, Run, block_tokens

RUNS = {
    "latent attention": Run(model="latent", vllm="0.32.0"),
    # vLLM's CPU kernels have bfloat16 alone, whose last digits depend on what runs beside it.
    "hybrid": Run(model="hybrid", vllm="0.30.0", dtype="bfloat16", together=1),
}


@pytest.mark.parametrize("kind", RUNS)
@LAYOUTS
def test_prompts_come_back_right(
    engine: Callable[[Run], Finished], kind: str, contiguous: bool
) -> None:
    run = replace(RUNS[kind], runner="v2", rounds=("short", "short"), contiguous=contiguous)
    plain = engine(replace(run, kvpatch=False, offload=False, contiguous=True))
    ours = engine(run)
    assert_same(ours, plain)
    assert [record["cached"] for record in plain.round(1)] == [0] * 8
    assert [record["cached"] for record in ours.round(1)] == [640] * 8
    assert ours.result["returned"] >= 8 * 640 // block_tokens(run.model)
    assert ours.result["changed"] == []
    assert "KV on elastic memory: yes" in ours.log
