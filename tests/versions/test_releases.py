"""Engines of other releases, beside the cells of the matrix.

Each release has an environment of its own, which scripts/environment makes; the first
run of this lane makes them all.
"""

from dataclasses import replace

import pytest
from packaging.version import Version

from harness import releases
from harness.engines.fixtures import LAYOUTS
from harness.engines.oracle import PLAIN, assert_same, same_tokens
from harness.engines.runs import Run
from kvpatch import supported
from kvpatch.versions import Span

COUNT = 8  # prompts of 21 blocks on 139
SMALL_TIER = 100  # blocks
ROUNDS = (str(COUNT),) * 2

RUNNERS = [
    *((vllm, "v2") for vllm in supported.validated() if Version(vllm) >= Version("0.28")),
    (releases.newest(), "v1"),
]
EVERY = pytest.mark.parametrize(
    ("vllm", "runner"), RUNNERS, ids=["-".join(where) for where in RUNNERS]
)


@EVERY
@LAYOUTS
def test_a_cpu_tier_smaller_than_the_load_evicts_and_stays_right(engine, vllm, runner, contiguous):
    run = Run(rounds=ROUNDS, vllm=vllm, runner=runner, contiguous=contiguous, cpu_blocks=SMALL_TIER)
    # One at a time: computed anew beside other requests, a block differs in its last digits.
    ours = engine(replace(run, together=1))
    assert_same(ours, engine(replace(PLAIN, rounds=ROUNDS, vllm=vllm, runner=runner)))
    assert ours.result["evicted"] > 0
    assert ours.result["changed"] == []


@EVERY
def test_without_a_connector_kvcached_runs_alone_and_is_elastic(engine, vllm, runner):
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


def test_on_0_28_without_the_geometry_patch_runner_v2_corrupts_silently(engine):
    """The oracle can fail on this runner too."""
    base = Run(rounds=ROUNDS, runner="v2", vllm="0.28.0")
    broken = engine(replace(base, revert=("offloading.register_kv_caches",)))
    plain = engine(replace(base, kvpatch=False, offload=False))
    assert [record["cached"] for record in broken.round(1)] == [640] * COUNT
    assert same_tokens(broken.round(1), plain.round(1)) == 0


NEWEST_WITHOUT_V2 = supported.validated(Span(supported.FLOOR, "0.28"))[-1]


def test_v1_is_chosen_where_vllm_would_take_v2_as_on_a_gpu(engine):
    """With Triton there and nothing asked for, kvpatch alone keeps this model on V1."""
    vllm = NEWEST_WITHOUT_V2
    ours = engine(Run(rounds=ROUNDS, vllm=vllm, runner="v2"))
    assert ours.result["runner"] == "v1"
    assert ours.log.count("kvpatch: Model Runner V1 is used where vLLM would use V2") == 1
    assert_same(ours, engine(replace(PLAIN, rounds=ROUNDS, vllm=vllm)))
