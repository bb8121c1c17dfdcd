"""CPU tiers of real engines in a host pool: tokens, bytes and memory, alone and with others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engines import process
from harness.engines.fixtures import MODELS
from harness.engines.oracle import PLAIN, Engine, assert_same
from harness.engines.runs import (
    ALL,
    BLOCK,
    Device,
    Finished,
    Run,
    block_bytes,
    engine_arguments,
    model_of,
    python_of,
    run_driver,
)
from kvpatch.environ import HOST_POOL
from kvpatch.pool import ledger

MIB = 1 << 20
NAME = f"engines{os.getpid()}"
POOL = ((HOST_POOL.name, f"256MiB@{NAME}"),)  # extents of 4 MiB
# Blocks that each prompt of a load stores; what it generates does not fill one.
STORED = 640 // BLOCK
# The rule that refuses a pool until its release is in ``host_pool.rules.RELEASES``.
UNTESTED = ("KVP342",)
RELEASES = pytest.mark.parametrize("vllm", ["", "0.28.0"])


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Iterator[None]:
    """What was in memory before the tests is there after them, and no more."""
    yield
    folder = ledger.home(NAME)
    assert ledger.show(folder, remove=True) is None
    assert list(folder.iterdir()) == []
    folder.rmdir()


@RELEASES
@MODELS
def test_prompts_from_a_tier_in_a_pool_give_plain_vllms_tokens(
    engine: Engine, model: str, vllm: str
) -> None:
    ours = engine(Run(model=model, vllm=vllm, environment=POOL, forced=UNTESTED))
    assert_same(ours, engine(replace(PLAIN, model=model, vllm=vllm)))
    assert [record["cached"] for record in ours.round(1)] == [640] * ALL
    assert ours.result["changed"] == []
    assert any(patch.startswith("pool.") for patch in ours.result["patches"])


def test_a_pool_smaller_than_the_load_evicts_and_stays_right(engine: Engine) -> None:
    size = 100 * block_bytes("llama")
    small = ((HOST_POOL.name, f"{size}@{NAME}small"),)
    ours = engine(Run(environment=small, forced=UNTESTED))
    assert_same(ours, engine(PLAIN))
    assert ours.result["evicted"] > 0
    assert ours.result["changed"] == []
    assert ledger.show(ledger.home(f"{NAME}small"), remove=True) is None
    ledger.home(f"{NAME}small").rmdir()


def steps_of(
    device: Device, folder: Path, run: Run, *steps: tuple[str, Any], **engine: Any
) -> list[Any]:
    """Let an engine of ``run`` do steps; return what they saw."""
    done = run_driver(
        job(run, steps, engine), device.environ(run), folder, vllm=run.vllm, driver="pool_driver"
    )
    return results(done)


def job(run: Run, steps: Any, engine: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": str(model_of(run.model, run.kv_heads, run.vllm)),
        "engine": engine_arguments(run) | engine,
        "steps": steps,
        "forced": UNTESTED,
    }


def results(done: Finished) -> list[Any]:
    assert done.code == 0, done.log[-4000:]
    assert done.result["left"] is False
    assert done.result.get("changed", []) == []
    return list(done.result["steps"])


def agrees(seen: dict[str, Any]) -> bool:
    """The ledger, the kernel, and every worker's page tables and device agree."""
    ranks = seen["ranks"]
    return (
        seen["kernel"] == seen["committed"] <= seen["records"] <= seen["limit"]
        and all(one["registered"] == seen["committed"] for one in ranks)
        and all(one["mapped"] <= seen["committed"] for one in ranks)
    )


@RELEASES
def test_memory_is_committed_on_use_and_given_back(
    device: Device, tmp_path: Path, vllm: str
) -> None:
    run = Run(environment=POOL, vllm=vllm)
    start, first, full, _, empty, again, after, _, lowered = steps_of(
        device,
        tmp_path,
        run,
        ("see", None),
        ("round", "few"),
        ("see", None),
        ("reset", None),
        ("see", None),
        ("round", "few"),
        ("see", None),
        ("limit", 8 * MIB),
        ("see", None),
    )
    for seen in (start, full, empty, after, lowered):
        assert agrees(seen), seen
    assert start["committed"] <= start["extent"]
    assert full["resident"] == len(first) * STORED * block_bytes("llama")
    assert full["committed"] <= 1.05 * full["resident"] + full["extent"]
    assert empty["resident"] == 0
    assert empty["committed"] <= empty["extent"]
    assert [one["tokens"] for one in again] == [one["tokens"] for one in first]
    assert after["resident"] == full["resident"]
    assert lowered["committed"] <= 8 * MIB
    assert lowered["evicted"] > 0


def test_the_start_takes_no_more_for_a_larger_tier(device: Device, tmp_path: Path) -> None:
    """Of 16 GiB in a pool that may have as much: what is committed, mapped and registered."""
    run = Run(environment=((HOST_POOL.name, f"16GiB@{NAME}large"),), cpu_blocks=1 << 16)
    (seen,) = steps_of(device, tmp_path, run, ("see", None))
    assert agrees(seen), seen
    assert seen["ceiling"] == 16 << 30
    assert seen["committed"] <= seen["extent"] == 64 * MIB
    ledger.home(f"{NAME}large").rmdir()


def test_every_rank_has_the_same_extents(device: Device, tmp_path: Path) -> None:
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    first, full, _, again, _, empty = steps_of(
        device,
        tmp_path,
        Run(environment=POOL),
        ("round", "few"),
        ("see", None),
        ("round", "back"),
        ("round", "few"),
        ("reset", None),
        ("see", None),
        **ranks,
    )
    assert agrees(full), full
    assert agrees(empty), empty
    assert len(full["ranks"]) == 2
    assert empty["committed"] <= empty["extent"]
    assert [one["tokens"] for one in again] == [one["tokens"] for one in first]
    assert sum(one["cached"] for one in again) > 0


class Started:
    """An engine that waits at its steps."""

    def __init__(self, device: Device, folder: Path, run: Run, *steps: tuple[str, Any]) -> None:
        folder.mkdir()
        self.result = folder / "result.json"
        (folder / "job.json").write_text(json.dumps(job(run, steps, {})))
        reading, output = os.pipe()
        stdin, self.input = os.pipe()
        self.process = process.start(
            "harness.engines.pool_driver",
            [folder / "job.json", self.result],
            device.environ(run),
            python_of(run.vllm),
            output,
            stdin,
        )
        os.close(output)
        os.close(stdin)
        self.output = os.fdopen(reading)
        self.log: list[str] = []

    def hear(self, word: str) -> None:
        """Wait until it tells a word."""
        for line in self.output:
            self.log.append(line)
            if line == f"driver: {word}\n":
                return
        raise AssertionError("".join(self.log)[-4000:])

    def go_on(self) -> None:
        os.write(self.input, b"\n")

    def seen(self) -> list[Any]:
        return list(json.loads(self.result.read_text())["steps"])

    def end(self) -> None:
        os.close(self.input)
        self.log += self.output.readlines()
        assert self.process.wait(60) == 0, "".join(self.log)[-4000:]

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        os.close(self.input)
        self.output.close()


def test_an_idle_engine_makes_room_and_a_killed_one_leaves_everything(
    device: Device, tmp_path: Path, engine: Engine
) -> None:
    """A pool of 48 MiB: two prompts of 5 MiB each fill a third of it."""
    size = 48 * MIB
    run = Run(environment=((HOST_POOL.name, f"{size}@{NAME}two"),))
    one = Started(device, tmp_path / "one", run, ("round", "8"), ("see", None), ("wait", "full"))
    one.hear("full")
    _, full = one.seen()
    assert agrees(full), full
    assert full["committed"] > size // 2
    two = Started(
        device,
        tmp_path / "two",
        run,
        ("round", "8"),
        ("see", None),
        ("wait", "shared"),
        ("round", "8"),
        ("round", "8"),
        ("see", None),
    )
    two.hear("shared")
    _, shared = two.seen()[:2]
    assert shared["records"] <= size
    assert shared["committed"] > full["extent"], "the other engine, which is idle, gave nothing"
    one.kill()
    two.go_on()
    two.end()
    *_, again, last = two.seen()
    assert last["engines"] == 1
    assert last["records"] == last["committed"] <= size
    plain = engine(PLAIN).round(0)[:8]
    assert [record["tokens"] for record in again] == [record["tokens"] for record in plain]
    ledger.home(f"{NAME}two").rmdir()
