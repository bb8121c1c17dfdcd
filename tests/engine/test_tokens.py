"""The oracle: tokens, log-probabilities and bytes, against plain vLLM on one schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.engines.fixtures import LAYOUTS, MODELS
from harness.engines.oracle import PLAIN, SMALL_TIER, Engine, assert_same, same_tokens, widest_gap
from harness.engines.runs import ALL, BLOCK, Run


@MODELS
@LAYOUTS
def test_prompts_served_from_the_cpu_tier_give_plain_vllms_tokens(
    engine: Engine, model: str, contiguous: bool
) -> None:
    run = Run(model=model, contiguous=contiguous)
    plain = engine(replace(PLAIN, model=model))
    ours = engine(run)
    assert_same(ours, plain)
    # Nothing is left on the device from round 1, so all of it came from the tier.
    assert [record["cached"] for record in plain.round(1)] == [0] * ALL
    assert [record["cached"] for record in ours.round(1)] == [640] * ALL
    assert ours.result["groups"] == {"llama": 1, "sliding": 2}[model]
    assert "KV on elastic memory: yes" in ours.log


@MODELS
@LAYOUTS
def test_restored_blocks_have_the_bytes_they_had(
    engine: Engine, model: str, contiguous: bool
) -> None:
    run = Run(model=model, contiguous=contiguous)
    ours = engine(run)
    ours.round(1)
    restored = ALL * 640 // BLOCK
    assert ours.result["returned"] >= restored
    assert ours.result["changed"] == []


@LAYOUTS
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_cpu_tier_smaller_than_the_load_evicts_and_stays_right(
    engine: Engine, policy: str, contiguous: bool
) -> None:
    ours = engine(Run(contiguous=contiguous, cpu_blocks=SMALL_TIER, policy=policy))
    assert_same(ours, engine(PLAIN))
    assert ours.result["evicted"] > 0
    assert ours.result["changed"] == []


def test_static_memory_gives_the_same_tokens_through_the_host_device(engine: Engine) -> None:
    static = engine(Run(kvpatch=False))
    assert_same(static, engine(PLAIN))
    assert [record["cached"] for record in static.round(1)] == [640] * ALL


def test_in_bfloat16_elastic_memory_gives_the_tokens_of_static_memory(engine: Engine) -> None:
    """Compared with offloading from static memory, one request at a time: in bfloat16 what
    is computed together, as after a hit, changes the last digits."""
    static = engine(Run(kvpatch=False, dtype="bfloat16", together=1))
    ours = engine(Run(dtype="bfloat16", together=1))
    for index in range(2):
        assert same_tokens(ours.round(index), static.round(index)) == ALL
        assert widest_gap(ours.round(index), static.round(index)) == 0
    assert ours.result["changed"] == []


def test_without_a_connector_kvcached_runs_alone(engine: Engine) -> None:
    alone = engine(Run(offload=False))
    assert_same(alone, engine(PLAIN))
    assert "KV on elastic memory: yes" in alone.log
