"""The fs tier behind the CPU tier: what comes back from a disk, and what must not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from proofs import Proves
from runs import Device, Finished, Run, engine_arguments, prompts, run_driver
from test_tokens import PLAIN, same_tokens, widest_gap

Engine = Callable[[Run], Finished]
Serve = Callable[..., Finished]

# So that another process finds the blocks by the same hashes.
SAME_HASHES = ("PYTHONHASHSEED", "0")
FEW = 60  # blocks of the CPU tier: three prompts
APART = 6  # prompts that are asked again, one at a time
# Room for four prompts; the second model needs blocks in both its groups for the longest one.
SMALL = {
    model: {"num_gpu_blocks_override": blocks}
    for model, blocks in {"llama": 96, "sliding": 132}.items()
}


def on(disk: Path | str, **more: Any) -> Run:
    return Run(tiers=(str(disk),), cpu_blocks=FEW, environment=(SAME_HASHES,), **more)


@pytest.fixture(scope="module")
def serve(
    models: Callable[[str], Path], device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Serve:
    """Run the first prompts one at a time on an engine of its own."""

    def run(wanted: Run, times: int = 1, **more: Any) -> Finished:
        job = {
            "model": str(models(wanted.model)),
            "engine": engine_arguments(wanted) | more.pop("engine", {}),
            "rounds": [[prompt] for prompt in prompts(24)[:APART]] * times,
            "forced": wanted.forced,
            **more,
        }
        folder = tmp_path_factory.mktemp("tiers")
        return run_driver(job, device.environ(wanted), folder, vllm=wanted.vllm)

    return run


def answers(finished: Finished, time: int = 0) -> list[Any]:
    """The records of the prompts that were run one at a time, of one of the times."""
    finished.round(0)
    return list(itertools.chain.from_iterable(finished.result["rounds"]))[
        time * APART : (time + 1) * APART
    ]


def hits(records: list[Any]) -> list[int]:
    return [record["cached"] for record in records]


def assert_comes_back(finished: Finished, plain: Finished) -> None:
    """The second time, prompts that device and CPU tier no longer have come from the disk."""
    assert_plain(answers(finished), plain)
    assert_plain(answers(finished, 1), plain)
    assert hits(answers(finished)) == [0] * APART
    assert hits(answers(finished, 1)) == [640] * APART
    assert finished.result["evicted"] > 0
    assert finished.result["returned"] >= APART * 20
    assert finished.result["changed"] == []


def assert_plain(records: list[Any], plain: Finished) -> None:
    expected = plain.round(0)[:APART]
    assert same_tokens(records, expected) == APART
    assert widest_gap(records, expected) < 1e-4


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def filled(serve: Serve, disk: Path) -> Finished:
    """The first engine on the disk, contiguous; each prompt twice.

    Device and CPU tier hold four and three prompts, so that none of six is left in them.
    """
    return serve(on(disk), times=2, watch=True, engine=SMALL["llama"])


def test_prompts_the_cpu_tier_evicted_come_back_from_disk(
    filled: Finished, proves: Proves, disk: Path, engine: Engine
) -> None:
    proves("tiering fs", on(disk))
    assert_comes_back(filled, engine(PLAIN))


@pytest.mark.parametrize(
    ("model", "contiguous"), [("llama", False), ("sliding", True), ("sliding", False)]
)
def test_so_they_do_with_the_other_model_and_layout(
    serve: Serve, proves: Proves, tmp_path: Path, engine: Engine, model: str, contiguous: bool
) -> None:
    run = on(tmp_path, model=model, contiguous=contiguous)
    proves("tiering fs", run)
    finished = serve(run, times=2, watch=True, engine=SMALL[model])
    assert_comes_back(finished, engine(replace(PLAIN, model=model)))


def test_a_fresh_process_is_served_from_the_disk(
    filled: Finished, serve: Serve, disk: Path, engine: Engine
) -> None:
    answers(filled)
    restarted = answers(serve(on(disk)))
    assert_plain(restarted, engine(PLAIN))
    assert hits(restarted) == [640] * APART


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
    filled: Finished,
    serve: Serve,
    disk: Path,
    engine: Engine,
    other: dict[str, Any],
    engine_changes: dict[str, Any],
) -> None:
    answers(filled)
    before = {folder.name for folder in disk.iterdir()}
    run = replace(on(disk), **other)
    ended = serve(run, engine=engine_changes)
    records = answers(ended)
    if run.dtype == "float32":
        assert_plain(records, engine(PLAIN))
    assert hits(records) == [0] * APART
    assert {folder.name for folder in disk.iterdir()} > before


# What happens to the disk, before and after the CPU tier is emptied, and what is then found.
FAULTS = {
    "truncated": ("nothing", "truncate", 0),
    "a bit changed": ("nothing", "flip", 0),
    "removed": ("nothing", "remove", 0),
    "full": ("nothing", "fill", 0),
    "with room again": ("nothing", "empty", 0),
    "filled again": ("nothing", "nothing", 640),
    "hanging": ("nothing", "hang", 0),
    "answering again": ("answer", "put_back", 640),
}


@pytest.fixture(scope="module")
def faulty(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One engine; before each time but the first something happens to its disk."""
    disk = tmp_path_factory.mktemp("faults") / "disk"
    run = on(disk)
    patience = ("KVPATCH_TIER_PATIENCE", "1")
    return serve(
        replace(run, environment=(*run.environment, patience)),
        times=len(FAULTS) + 1,
        disk=str(disk),
        faults={(n + 1) * APART: fault[:2] for n, fault in enumerate(FAULTS.values())},
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_of_the_disk_the_tokens_are_right(
    faulty: Finished, engine: Engine, fault: str
) -> None:
    records = answers(faulty, 1 + list(FAULTS).index(fault))
    assert_plain(records, engine(PLAIN))
    assert hits(records) == [FAULTS[fault][2]] * APART


def test_many_prompts_at_once_on_a_cpu_tier_smaller_than_they_are(
    engine: Engine, tmp_path: Path
) -> None:
    ours = engine(replace(on(tmp_path), tiers=(str(tmp_path / "a"), str(tmp_path / "b"))))
    for index in range(2):
        assert same_tokens(ours.round(index), engine(PLAIN).round(index)) == 24
        assert widest_gap(ours.round(index), engine(PLAIN).round(index)) < 1e-4
    assert sum(hits(ours.round(1))) > 0
