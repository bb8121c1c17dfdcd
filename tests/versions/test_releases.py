"""The engine lane's oracle on every release and runner that is supported.

Each release has an environment of its own, which scripts/environment makes; the first
run of this lane makes them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.engines.fixtures import LAYOUTS, MODELS
from harness.engines.oracle import PLAIN, assert_same, same_tokens
from harness.engines.runs import BLOCK, Finished, Run

Engine = Callable[[Run], Finished]
COUNT = 8  # prompts of 21 blocks on 139
SMALL_TIER = 100  # blocks
ROUNDS = (str(COUNT),) * 2

# The release in .venv is "", which the engine lane runs on Runner V1.
RELEASES = [
    ("", "v2"),
    ("0.29.0", "v2"),
    ("0.30.0", "v2"),
    ("0.31.0", "v2"),
    ("0.32.0", "v2"),
    ("0.32.0", "v1"),
]
EVERY = pytest.mark.parametrize(
    ("vllm", "runner"), RELEASES, ids=[f"{vllm or '0.28.0'}-{runner}" for vllm, runner in RELEASES]
)


@EVERY
@MODELS
@LAYOUTS
def test_prompts_served_from_the_cpu_tier_give_plain_vllms_tokens(
    engine: Engine, vllm: str, runner: str, model: str, contiguous: bool
) -> None:
    run = Run(rounds=ROUNDS, vllm=vllm, runner=runner, model=model, contiguous=contiguous)
    plain = engine(replace(PLAIN, rounds=ROUNDS, vllm=vllm, runner=runner, model=model))
    ours = engine(run)
    assert_same(ours, plain)
    assert plain.result["runner"] == ours.result["runner"] == runner
    assert [record["cached"] for record in plain.round(1)] == [0] * COUNT
    assert [record["cached"] for record in ours.round(1)] == [640] * COUNT
    assert "KV on elastic memory: yes" in ours.log
    assert ours.result["layout"] in (None, {True: "BLHNC", False: "LBHNC"}[contiguous])


@EVERY
@MODELS
@LAYOUTS
def test_restored_blocks_have_the_bytes_they_had(
    engine: Engine, vllm: str, runner: str, model: str, contiguous: bool
) -> None:
    run = Run(rounds=ROUNDS, vllm=vllm, runner=runner, model=model, contiguous=contiguous)
    ours = engine(run)
    ours.round(1)
    assert ours.result["returned"] >= COUNT * 640 // BLOCK
    assert ours.result["changed"] == []


@EVERY
@LAYOUTS
def test_a_cpu_tier_smaller_than_the_load_evicts_and_stays_right(
    engine: Engine, vllm: str, runner: str, contiguous: bool
) -> None:
    run = Run(rounds=ROUNDS, vllm=vllm, runner=runner, contiguous=contiguous, cpu_blocks=SMALL_TIER)
    # One at a time: computed anew beside other requests, a block differs in its last digits.
    ours = engine(replace(run, together=1))
    assert_same(ours, engine(replace(PLAIN, rounds=ROUNDS, vllm=vllm, runner=runner)))
    assert ours.result["evicted"] > 0
    assert ours.result["changed"] == []


@EVERY
def test_without_a_connector_kvcached_runs_alone_and_is_elastic(
    engine: Engine, vllm: str, runner: str
) -> None:
    few = (
        ("KVCACHED_MAX_RESERVED_PAGES", "2"),
        ("KVCACHED_MIN_RESERVED_PAGES", "1"),
        ("KVCACHED_PAGE_PREALLOC_ENABLED", "false"),
        ("KVCACHED_MAX_CACHED_TOKENS", "-1"),
    )
    alone = engine(Run(rounds=ROUNDS, vllm=vllm, runner=runner, offload=False, environment=few))
    assert_same(alone, engine(replace(PLAIN, rounds=ROUNDS, vllm=vllm, runner=runner)))
    assert "KV on elastic memory: yes" in alone.log
    loaded, idle = alone.result["after_load"], alone.result["after_reset"]
    page = 4 * (2 << 20)
    assert loaded["charged"] == loaded["resident"] >= 4 * page
    assert idle["charged"] == idle["resident"] < loaded["charged"]


def test_on_0_28_without_the_geometry_patch_runner_v2_corrupts_silently(engine: Engine) -> None:
    """The oracle can fail on this runner too."""
    broken = engine(Run(rounds=ROUNDS, runner="v2", revert=("offloading.register_kv_caches",)))
    plain = engine(replace(PLAIN, rounds=ROUNDS, runner="v2"))
    assert [record["cached"] for record in broken.round(1)] == [640] * COUNT
    assert same_tokens(broken.round(1), plain.round(1)) == 0
