"""Elastic memory: an engine gives back what it does not use, and a neighbour takes it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.engines.runs import Device, Driver, Run, engine_arguments, prompts, run_driver

PAGE = 4 * (2 << 20)  # a contiguous page holds 2 MiB of each of the 4 layers
RESERVED = 2
FEW_RESERVED = (
    ("KVCACHED_MAX_RESERVED_PAGES", str(RESERVED)),
    ("KVCACHED_MIN_RESERVED_PAGES", "1"),
    ("KVCACHED_PAGE_PREALLOC_ENABLED", "false"),
    ("KVCACHED_MAX_CACHED_TOKENS", "-1"),
)
# kvcached keeps a page for block 0, and one that every unmapped address shows.
ALWAYS = 2


def job(model: Path, run: Run, blocks: int, load: list[Any], **more: Any) -> dict[str, Any]:
    length = 4096 if blocks > 140 else 2048
    arguments = engine_arguments(run) | {"num_gpu_blocks_override": blocks, "max_model_len": length}
    return {"model": str(model), "engine": arguments, "rounds": [load], **more}


@pytest.mark.parametrize("offload", [False, True], ids=["alone", "offloading"])
def test_after_the_load_memory_falls_to_the_reserved_pages(models, device, tmp_path, offload):
    run = Run(offload=offload, environment=FEW_RESERVED)
    ended = run_driver(job(models("llama"), run, 1000, prompts(24)), device.environ(run), tmp_path)
    ended.round(0)
    loaded, idle = ended.result["after_load"], ended.result["after_reset"]
    assert loaded["charged"] >= 480 // 32 * PAGE
    assert idle["charged"] <= (RESERVED + ALWAYS) * PAGE
    # The operating system has the pages back, not only the ledger.
    assert loaded["resident"] == loaded["charged"]
    assert idle["resident"] == idle["charged"]


def test_a_neighbour_takes_what_an_engine_gave_back(models, tmp_path):
    """B cannot run while A's cache fills the device; it can as soon as A resets."""
    small = Device(tmp_path, size="168MiB")  # 21 pages
    first = Run(offload=False, environment=(*FEW_RESERVED, ("KVCACHED_GPU_UTILIZATION", "0.8")))
    second = Run(offload=False, environment=FEW_RESERVED)
    load = prompts(40)
    a = Driver(
        job(models("llama"), first, 600, load, wait_before_reset=True),
        small.environ(first),
        tmp_path / "a",
    )
    try:
        a.hear("loaded")
        needs_four_pages = prompts(1, length=3600)
        b = Driver(
            job(models("llama"), second, 600, needs_four_pages),
            small.environ(second),
            tmp_path / "b",
        )
        try:
            b.hear("stalled")
            a.say()
            a.hear("reset")
            result = b.end()
            assert len(result["rounds"][0][0]["tokens"]) == 8
            a.say()
            kept = a.end()
        finally:
            b.kill()
    finally:
        a.kill()
    assert kept["after_load"]["charged"] >= 14 * PAGE
    assert kept["after_reset"]["charged"] <= (RESERVED + ALWAYS) * PAGE


def test_engines_that_one_program_starts_together_do_not_share_a_limit(models, device, tmp_path):
    """Same process group, same moment: kvcached alone gives both the same name."""
    plain = Run(kvpatch=False, offload=False)
    loads = {"small": (140, prompts(12)), "large": (600, prompts(12, seed=4))}

    def run(name: str, kind: Run) -> Any:
        folder = tmp_path / f"{name}-{kind.kvpatch}"
        folder.mkdir()
        blocks, load = loads[name]
        work = job(models("llama"), kind, blocks, load) | {"rounds": [load, load]}
        return run_driver(work, device.environ(kind), folder)

    with ThreadPoolExecutor() as pool:
        ours = list(pool.map(lambda name: run(name, Run()), loads))
        theirs = list(pool.map(lambda name: run(name, plain), loads))
    for one, other in zip(ours, theirs, strict=True):
        for index in range(2):
            tokens = [record["tokens"] for record in one.round(index)]
            assert tokens == [record["tokens"] for record in other.round(index)]
