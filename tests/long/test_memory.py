"""Elastic memory: an engine gives back what it does not use, and a neighbour takes it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.engines import process
from harness.engines.runs import Device, Run, engine_arguments, prompts, run_driver

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
def test_after_the_load_memory_falls_to_the_reserved_pages(
    models: Callable[[str], Path], device: Device, tmp_path: Path, offload: bool
) -> None:
    run = Run(offload=offload, environment=FEW_RESERVED)
    ended = run_driver(job(models("llama"), run, 1000, prompts(24)), device.environ(run), tmp_path)
    ended.round(0)
    loaded, idle = ended.result["after_load"], ended.result["after_reset"]
    assert loaded["charged"] >= 480 // 32 * PAGE
    assert idle["charged"] <= (RESERVED + ALWAYS) * PAGE
    # The operating system has the pages back, not only the ledger.
    assert loaded["resident"] == loaded["charged"]
    assert idle["resident"] == idle["charged"]


class Driver:
    """A driver that the test talks to."""

    def __init__(self, work: dict[str, Any], environment: dict[str, str], folder: Path) -> None:
        folder.mkdir()
        self.result_path = folder / "result.json"
        self.lines: list[str] = []
        job_path = folder / "job.json"
        job_path.write_text(json.dumps(work))
        theirs, self.stdin = os.pipe()
        self.stdout, their_output = os.pipe()
        self.process = process.start(
            "harness.engines.driver",
            [job_path, self.result_path],
            environment,
            sys.executable,
            stdout=their_output,
            stdin=theirs,
        )
        os.close(theirs)
        os.close(their_output)
        self.output = os.fdopen(self.stdout, errors="replace")

    def read_until(self, word: str) -> None:
        """Read the engine's lines until it says ``word``."""
        for line in self.output:
            self.lines.append(line)
            if line == f"driver: {word}\n":
                return
        raise AssertionError(f"ended before {word!r}\n" + "".join(self.lines[-40:]))

    def go_on(self) -> None:
        os.write(self.stdin, b"\n")

    def finish(self) -> dict[str, Any]:
        output = self.output.read()
        assert self.process.wait(120) == 0, "".join(self.lines[-40:]) + output[-3000:]
        return dict(json.loads(self.result_path.read_text()))


def test_a_neighbour_takes_what_an_engine_gave_back(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
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
        a.read_until("loaded")
        needs_four_pages = prompts(1, length=3600)
        b = Driver(
            job(models("llama"), second, 600, needs_four_pages),
            small.environ(second),
            tmp_path / "b",
        )
        try:
            b.read_until("stalled")
            a.go_on()
            a.read_until("reset")
            result = b.finish()
            assert len(result["rounds"][0][0]["tokens"]) == 8
            a.go_on()
            kept = a.finish()
        finally:
            b.process.kill()
    finally:
        a.process.kill()
    assert kept["after_load"]["charged"] >= 14 * PAGE
    assert kept["after_reset"]["charged"] <= (RESERVED + ALWAYS) * PAGE


def test_engines_that_one_program_starts_together_do_not_share_a_limit(
    models: Callable[[str], Path], device: Device, tmp_path: Path
) -> None:
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
