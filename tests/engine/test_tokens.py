"""The oracle: tokens, log-probabilities and bytes, against plain vLLM on one schedule."""

from dataclasses import replace

from harness.engines.fixtures import LAYOUTS, MODELS
from harness.engines.oracle import PLAIN, SMALL_TIER, assert_same
from harness.engines.runs import ALL, BLOCK, Run


@MODELS
@LAYOUTS
def test_prompts_served_from_the_cpu_tier_give_plain_vllms_tokens(engine, model, contiguous):
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
def test_restored_blocks_have_the_bytes_they_had(engine, model, contiguous):
    run = Run(model=model, contiguous=contiguous)
    ours = engine(run)
    ours.round(1)
    restored = ALL * 640 // BLOCK
    assert ours.result["returned"] >= restored
    assert ours.result["changed"] == []


@LAYOUTS
def test_a_cpu_tier_smaller_than_the_load_evicts_and_stays_right(engine, contiguous):
    ours = engine(Run(contiguous=contiguous, cpu_blocks=SMALL_TIER))
    assert_same(ours, engine(PLAIN))
    assert ours.result["evicted"] > 0
    assert ours.result["changed"] == []


def test_static_memory_gives_the_same_tokens_through_the_host_device(engine):
    static = engine(Run(kvpatch=False))
    assert_same(static, engine(PLAIN))
    assert [record["cached"] for record in static.round(1)] == [640] * ALL


def test_without_a_connector_kvcached_runs_alone(engine):
    alone = engine(Run(offload=False))
    assert_same(alone, engine(PLAIN))
    assert "KV on elastic memory: yes" in alone.log
