"""Tiers on other releases: a restart, other layouts, and the faults of disks."""

from dataclasses import replace

import pytest

from harness import releases
from harness.engines.multi import INSIDE
from harness.engines.oracle import assert_same
from harness.engines.runs import Run
from harness.engines.tiers import (
    APART,
    FAULTS,
    SMALL,
    answers,
    assert_comes_back,
    assert_found,
    hits,
    on,
)

RELEASES = dict.fromkeys(releases.between("0.24", before="0.28"), "v1") | {releases.newest(): "v2"}
OLDER = [vllm for vllm, runner in RELEASES.items() if runner == "v1"]


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    """A release and its runner, as a ``Run`` has them."""
    return {"vllm": request.param, "runner": RELEASES[request.param]}


@pytest.fixture(scope="module")
def plain(engine, release):
    """Plain vLLM of the release, which the first prompts are asked."""
    return engine(Run(kvpatch=False, offload=False, rounds=(str(APART),), **release))


@pytest.fixture(scope="module")
def disk(tmp_path_factory, release):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def filled(serve, disk, release):
    """The first engine on the disk, contiguous; each prompt twice."""
    return serve(on(disk, **release), times=2, watch=True, engine=SMALL["llama"])


def test_prompts_the_cpu_tier_evicted_come_back_from_disk(filled, plain):
    assert_comes_back(filled, plain)


def test_a_fresh_process_is_served_from_the_disk(filled, serve, disk, plain, release):
    answers(filled)
    assert_found(serve(on(disk, **release)), plain)


@pytest.mark.parametrize(
    "other", [{"contiguous": False}, {"kvpatch": False}], ids=["non-contiguous", "plain vLLM"]
)
def test_an_engine_that_means_other_bytes_finds_nothing_on_the_same_disk(
    filled, serve, disk, plain, release, other
):
    answers(filled)
    before = {folder.name for folder in disk.iterdir()}
    assert_found(serve(on(disk, **release, **other)), plain, 0)
    assert {folder.name for folder in disk.iterdir()} > before


@pytest.mark.parametrize("release", OLDER, indirect=True)
def test_after_every_fault_of_the_disk_the_tokens_are_right(serve, plain, release, tmp_path):
    """One engine; before each time but the first something happens to its disk."""
    run = on(tmp_path / "disk", **release)
    ended = serve(
        run.within({"KVPATCH_TIER_PATIENCE": "1"}),
        times=len(FAULTS) + 1,
        disk=str(tmp_path / "disk"),
        faults={(n + 1) * APART: fault[:2] for n, fault in enumerate(FAULTS.values())},
    )
    for time, (_, _, found) in enumerate(FAULTS.values(), start=1):
        assert_found(ended, plain, found, time)


@pytest.mark.parametrize("release", OLDER, indirect=True)
def test_with_two_ranks_a_fresh_process_is_served_from_the_disk(serve, plain, release, tmp_path):
    """The workers are processes of their own, which find the CPU tier by its name."""
    run = on(tmp_path / "disk", **release)
    for found in (0, 640):
        assert_found(serve(run, engine={"tensor_parallel_size": 2}), plain, found)


@pytest.mark.parametrize("release", OLDER, indirect=True)
def test_inside_a_multi_connector_prompts_come_back_from_disk(serve, plain, release, tmp_path):
    ended = serve(
        on(tmp_path / "disk", inside=INSIDE, **release),
        times=2,
        watch=True,
        engine=SMALL["llama"],
    )
    assert_comes_back(ended, plain)


@pytest.mark.parametrize("release", OLDER, indirect=True)
def test_many_prompts_at_once_on_a_cpu_tier_smaller_than_they_are(engine, release, tmp_path):
    expected = engine(Run(kvpatch=False, offload=False, **release))
    ours = engine(
        replace(on(tmp_path, **release), tiers=(str(tmp_path / "a"), str(tmp_path / "b")))
    )
    assert_same(ours, expected)
    assert sum(hits(ours.round(1))) > 0
