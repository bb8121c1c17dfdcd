"""A CPU tier in a host pool, on the other releases that it is validated with."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness import releases
from harness.engines.fixtures import MODELS
from harness.engines.oracle import PLAIN, Engine, assert_same_round, cached
from harness.engines.plugins import UNTIL_IT_RAN
from harness.engines.pools import Pooled, is_gone, live, pool_of, share
from harness.engines.runs import Run
from harness.engines.tiers import SAME_HASHES
from kvpatch import admitted

SIZE = 256 << 20
NEWEST = releases.newest_built()
POOL = pool_of(SIZE, "use").environment
Start = Callable[..., Pooled]


def others(connector: str) -> list[str]:
    """The releases that start with a connector in a pool, and that the lane long does not run."""
    known = admitted.releases_with("host pool", connector)
    return [release for release in known if release != NEWEST]


def compare(start_in_pool: Start, engine: Engine, run: Run) -> list[list[dict[str, object]]]:
    """Let an engine live in a pool; return its rounds, which have plain vLLM's tokens."""
    one = start_in_pool(run)
    same = {name: getattr(run, name) for name in ("model", "vllm", "dtype", "together")}
    plain = engine(replace(PLAIN, **same)).round(0)
    # Of bfloat16 and few heads the load fills less.
    rounds = live(one, run.model, *([2 << 20] if run.model == "hybrid" else []))
    for records in rounds:
        assert_same_round(records, plain)
    is_gone("use", one)
    return rounds


INSIDE = {"inside": ("OffloadingConnector",)}
CASES = [
    (vllm, changes)
    for connector, kinds in {
        "Offloading": ({}, {"simple": "eager"}),
        "tiering fs": ({"tiers": ("disk",)},),
        "Multi": (INSIDE,),
    }.items()
    for vllm in others(connector)
    for changes in kinds
]


@pytest.mark.parametrize(("vllm", "changes"), CASES)
@MODELS
def test_memory_is_committed_on_use_and_given_back(
    start_in_pool, engine, tmp_path, model, vllm, changes
):
    """Alone, with a disk behind it, or inside a MultiConnector."""
    run = replace(pool_of(SIZE, "use"), model=model, vllm=vllm, **changes)
    if run.tiers:
        run = replace(run, tiers=(str(tmp_path / "disk"),)).within(SAME_HASHES)
    *_, last = compare(start_in_pool, engine, run)
    # What the tier had to give back is on the disk.
    assert cached(last) > 0 or not run.tiers


@pytest.mark.parametrize("simple", ["", "eager"])
@pytest.mark.parametrize(
    "run",
    [
        Run(model="hybrid", dtype="bfloat16", together=1, vllm="0.31.0"),
        Run(model="latent", vllm=NEWEST),
    ],
    ids=["hybrid", "latent"],
)
def test_memory_of_other_models_is_given_back(start_in_pool, engine, run, simple):
    # The rules ask for a run of the matrix, of each kind of model by itself.
    run = replace(run, environment=POOL, simple=simple, forced=UNTIL_IT_RAN)
    compare(start_in_pool, engine, run)


@pytest.mark.parametrize(
    ("kind", "vllm"),
    [(kind, vllm) for vllm in others("Offloading") for kind in ("", "eager")]
    + [("disk", vllm) for vllm in others("tiering fs")],
)
def test_an_idle_engine_makes_room_and_a_killed_one_leaves_it(
    start_in_pool, engine, tmp_path, kind, vllm
):
    size = 48 << 20
    run = replace(pool_of(size, f"two{kind}", "" if kind == "disk" else kind), vllm=vllm)
    runs = [run, run]
    if kind == "disk":
        # What the other engine computed beside other tokens has other last digits.
        runs = [replace(run, tiers=(str(tmp_path / name),)) for name in ("one", "two")]
    share(start_in_pool, runs, size, engine(replace(PLAIN, vllm=vllm)).round(0))
