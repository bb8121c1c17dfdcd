"""CPU tiers in a host pool: tokens, bytes, and memory."""

from __future__ import annotations

from dataclasses import replace

from harness.engines.fixtures import MODELS
from harness.engines.oracle import PLAIN, Engine, assert_same
from harness.engines.runs import ALL, Run

POOL = (("KVPATCH_HOST_POOL", "512MiB@engine"),)


@MODELS
def test_prompts_from_a_tier_in_a_pool_give_plain_vllms_tokens(engine: Engine, model: str) -> None:
    ours = engine(Run(model=model, environment=POOL))
    assert_same(ours, engine(replace(PLAIN, model=model)))
    assert [record["cached"] for record in ours.round(1)] == [640] * ALL
    assert ours.result["changed"] == []
