"""Cells that the matrix refuses, started all the same: the fault that is named is there."""

from dataclasses import replace

from harness.engines.runs import EXAMPLE, Run
from harness.engines.tiers import APART, answers, hits, on

ONE_TIME = "8"  # prompts of 20 blocks on 139


def test_lazy_copies_of_0_29_are_counted_and_not_made(engine):
    """Blocks come from the CPU tier to which nothing was ever copied."""
    ours = engine(
        Run(
            vllm="0.29.0",
            runner="v2",
            simple="lazy",
            forced=("KVP316",),
            rounds=(ONE_TIME,) * 3,
            # Alone, a request that is loaded makes a step without tokens; with steps this
            # small, most of the blocks are not stored yet when it does.
            together=1,
            batch=640,
        )
    )
    ours.round(2)
    assert ours.result["simple"]["changed"] > 0


def test_eager_stores_of_windows_stop_before_0_22(engine):
    """The CPU tier has room for all, and some prompts are not served from it."""
    ours = engine(
        Run(
            model="sliding",
            vllm="0.19.1",
            simple="eager",
            windows=True,
            forced=("KVP317",),
            cpu_blocks=280,
            rounds=(ONE_TIME,) * 2,
        )
    )
    assert sum(record["cached"] for record in ours.round(1)) < int(ONE_TIME) * 640


def test_kvcached_has_no_adapter_for_runner_v2_before_0_28(engine):
    asked = (("VLLM_USE_V2_MODEL_RUNNER", "1"),)
    ours = engine(Run(vllm="0.27.1", runner="v2", environment=asked, forced=("KVP326",)))
    assert ours.code != 0
    assert "kvcached does not support the vLLM 0.27.1 Model Runner V2" in ours.log


def test_before_0_24_blocks_outlive_a_reset_of_the_cache(serve, tmp_path):
    """Nothing is on the disk any more, and the CPU tier has been told to forget everything."""
    ended = serve(
        replace(
            on(tmp_path / "disk", vllm="0.22.1", forced=("KVP317", "KVP322", "KVP329")),
            cpu_blocks=4096,
        ),
        times=2,
        disk=str(tmp_path / "disk"),
        faults={APART: ("nothing", "remove")},
    )
    assert hits(answers(ended, 1)) == [640] * APART


def test_the_example_tier_answers_with_whatever_lies_in_the_cpu_tier(engine):
    """Each prompt comes back from a tier that has kept its name and not one byte."""
    ours = engine(
        Run(tiers=(EXAMPLE,), cpu_blocks=60, forced=("KVP321",), rounds=(ONE_TIME,) * 2, together=1)
    )
    assert sum(record["cached"] for record in ours.round(1)) > 0
    assert ours.result["changed"]
