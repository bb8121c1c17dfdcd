"""The fs tier behind the CPU tier: what comes back from a disk, and what must not."""

from dataclasses import replace
from functools import cache

import pytest

from harness.engines.oracle import PLAIN, assert_same
from harness.engines.runs import Finished
from harness.engines.tiers import (
    APART,
    FAULTS,
    SMALL,
    answers,
    assert_comes_back,
    assert_found,
    assert_plain,
    hits,
    on,
)
from kvpatch.environ import TIER_PATIENCE, TIER_SIZE


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def filled(serve, disk):
    """The first engine on the disk, contiguous; each prompt twice.

    Device and CPU tier hold four and three prompts, so that none of six is left in them.
    """
    ended = serve(on(disk), times=2, watch=True, engine=SMALL["llama"])
    # Before other engines write there.
    ended.result["written"] = [path.stat().st_size for path in disk.rglob("*.bin")]
    return ended


def test_prompts_the_cpu_tier_evicted_come_back_from_disk(filled, disk, engine):
    assert_comes_back(filled, engine(PLAIN))


def test_a_fresh_process_is_served_from_the_disk(filled, serve, disk, engine):
    answers(filled)
    assert_found(serve(on(disk)), engine(PLAIN))


@pytest.mark.parametrize(
    ("other", "engine_changes"),
    [
        ({"contiguous": False}, {}),
        ({"kvpatch": False}, {}),
        ({"dtype": "bfloat16"}, {}),
        ({}, {"tensor_parallel_size": 2}),
    ],
    ids=["non-contiguous", "plain vLLM", "bfloat16", "two ranks"],
)
def test_an_engine_that_means_other_bytes_finds_nothing_on_the_same_disk(
    filled, serve, disk, engine, other, engine_changes
):
    answers(filled)
    before = {folder.name for folder in disk.iterdir()}
    run = replace(on(disk), **other)
    ended = serve(run, engine=engine_changes)
    records = answers(ended)
    if run.dtype == "float32":
        assert_plain(records, engine(PLAIN))
    assert hits(records) == [0] * APART
    assert {folder.name for folder in disk.iterdir()} > before


HANGS = ("hanging", "answering again")  # no other disk is waited for in vain


@pytest.fixture(scope="module")
def faulty(serve, tmp_path_factory):
    """The engine that met a fault, and the time after which it was.

    Two engines; before each time but the first something happens to their disk.
    """

    @cache
    def met(hangs: bool) -> tuple[list[str], Finished]:
        disk = tmp_path_factory.mktemp("faults") / "disk"
        names = [name for name in FAULTS if (name in HANGS) is hangs]
        run = on(disk)
        if hangs:
            run = run.within({TIER_PATIENCE.name: "3"})
        faults = {(n + 1) * APART: FAULTS[name][:2] for n, name in enumerate(names)}
        return names, serve(run, times=len(names) + 1, disk=str(disk), faults=faults)

    def faulty(fault: str) -> tuple[Finished, int]:
        names, finished = met(fault in HANGS)
        return finished, 1 + names.index(fault)

    return faulty


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_of_the_disk_the_tokens_are_right(faulty, engine, fault):
    finished, time = faulty(fault)
    assert_found(finished, engine(PLAIN), FAULTS[fault][2], time)


def test_many_prompts_at_once_on_a_cpu_tier_smaller_than_they_are(engine, tmp_path):
    ours = engine(replace(on(tmp_path), tiers=(str(tmp_path / "a"), str(tmp_path / "b"))))
    assert_same(ours, engine(PLAIN))
    assert sum(hits(ours.round(1))) > 0


def test_a_tier_with_a_size_keeps_what_was_used_last(filled, serve, tmp_path, engine):
    """Of six prompts room for two and a half: each time the oldest of them is gone again."""
    answers(filled)
    written = filled.result["written"]
    size = sum(written) * 5 // 12
    run = on(tmp_path).within({TIER_SIZE.name: str(size)})
    ended = serve(run, times=2, watch=True, engine=SMALL["llama"])
    for time in range(2):
        assert_plain(answers(ended, time), engine(PLAIN))
    assert ended.result["changed"] == []
    left = [path.stat().st_size for path in tmp_path.rglob("*.bin")]
    assert size - 2 * written[0] < sum(left) <= size
    assert hits(answers(ended, 1)) == [0] * APART
    # Without a size, and with less of it, the next ones go on with the same folder.
    again = answers(serve(on(tmp_path)))
    assert_plain(again, engine(PLAIN))
    assert sum(hits(again)) > 0
    less = run.within({TIER_SIZE.name: str(size // 2)})
    assert_plain(answers(serve(less)), engine(PLAIN))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.bin")) <= size // 2
