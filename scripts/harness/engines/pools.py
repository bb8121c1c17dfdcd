"""Engines whose CPU tier is in a host pool, each in a process that does one step after another."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.engines.oracle import cached
from harness.engines.runs import (
    BLOCK,
    Device,
    Driver,
    Run,
    block_bytes,
    engine_arguments,
    weights_of,
)
from kvpatch.environ import HOST_POOL
from kvpatch.pool import ledger


class Pooled(Driver):
    """A running engine of ``pool_driver``.

    Args:
        device: of the engine.
        folder: of its own, made here.
        run: what it is.
        watch: whether its blocks are compared with what they were when they were stored.
        engine: more of its arguments.

    Raises:
        AssertionError: it did not start; the end of its log.
    """

    def __init__(
        self, device: Device, folder: Path, run: Run, watch: bool = True, **engine: Any
    ) -> None:
        job = {
            "model": str(weights_of(run)),
            "engine": engine_arguments(run) | engine,
            "watch": watch,
        }
        self.simple = bool(run.simple)
        self.environment = device.environ(run)
        super().__init__(job, self.environment, folder, "pool_driver", run.vllm)
        self.hear("ready")

    def do(self, what: str, value: Any = None) -> Any:
        """Let it do one step of ``pool_driver.Watched.step``; return what that saw."""
        self.say(json.dumps([what, value]))
        self.hear("done")
        return self.result()["seen"]


TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Blocks that each prompt of a load stores; what it generates does not fill one.
STORED = 640 // BLOCK
LOWERED = 8 << 20


def pool_of(size: int, name: str, simple: str = "") -> Run:
    """An engine in a pool of a size, which has a name of this process's own."""
    return Run(environment=((HOST_POOL.name, f"{size}@{name_of(name)}"),), simple=simple)


def name_of(name: str) -> str:
    """The name of a pool that is this process's own."""
    return f"engines{os.getpid()}{name}"


def agrees(seen: dict[str, Any], simple: bool = False) -> bool:
    """Whether the ledger, the kernel, and every worker's page tables and device agree.

    Each worker of SimpleCPUOffloadConnector has a part of an extent, and others the whole.
    """
    ranks = seen["ranks"]
    parts = len(ranks) if simple else 1
    return (
        seen["kernel"] == seen["committed"] <= seen["records"] <= seen["limit"]
        and all(one["registered"] * parts == seen["committed"] for one in ranks)
        and all(one["mapped"] <= seen["committed"] for one in ranks)
    )


def live(one: Pooled, model: str, lowered_to: int = LOWERED) -> list[list[Any]]:
    """Let an engine use its tier, reset it, use it again and lose nearly all of its memory.

    Args:
        one: the engine.
        model: the kind of its model.
        lowered_to: bytes of the pool in the end, less than the load fills.

    Returns:
        The records of its rounds of "few".

    Raises:
        AssertionError: memory was not what was counted, or more than the blocks need.
    """
    begun = one.do("see")
    first = one.do("round", "few")
    one.do("nothing ahead")
    full = one.do("see")
    one.do("reset")
    empty = one.do("see")
    again = one.do("round", "few")
    after = one.do("see")
    one.do("round", "few")
    one.do("limit", lowered_to)
    lowered = one.do("see")
    last = one.do("round", "few")
    for seen in (begun, full, empty, after, lowered, one.do("see")):
        assert agrees(seen, one.simple), seen
    assert begun["committed"] <= begun["extent"]
    assert full["committed"] <= 1.05 * full["resident"] + full["extent"], full
    # A store for which there was no memory in time was skipped.
    if model == "llama":
        assert 0 < full["resident"] <= len(first) * STORED * block_bytes(Run(model=model))
    assert empty["resident"] == 0
    assert empty["committed"] <= empty["extent"]
    assert after["resident"] > 0
    assert lowered["committed"] <= lowered_to
    assert lowered["evicted"] > 0
    assert one.result()["returned"] > 0, "no block that was loaded has been compared"
    return [first, again, last]


def share(start: Callable[[Run], Pooled], runs: Sequence[Run], size: int, plain: list[Any]) -> None:
    """Let an idle engine of a pool make room for another one, which stays when that is killed.

    Args:
        start: starts an engine.
        runs: both.
        size: bytes of the pool, whose name is in their environment.
        plain: what plain vLLM answers to the load "8".

    Raises:
        AssertionError: memory was not where it should be, or an answer is another one.
    """
    (name,) = {dict(run.environment)[HOST_POOL.name].partition("@")[2] for run in runs}
    expected = [one["tokens"] for one in plain[:8]]
    one = start(runs[0])
    one.do("round", "8")
    full = one.do("see")
    assert agrees(full, one.simple), full
    assert full["committed"] > size // 2
    two = start(runs[1])
    two.do("round", "8")
    shared = two.do("see")
    assert shared["engines"] == 2
    assert shared["records"] <= size
    assert shared["committed"] > full["extent"], "the other engine, which is idle, gave nothing"
    if one.simple and not two.simple:
        given = one.do("see")
        assert agrees(given | {"limit": size}, simple=True), given
        assert given["evicted"] > 0
        assert [record["tokens"] for record in one.do("round", "8")] == expected
    one.kill()
    two.do("alone")
    if not (one.simple or runs[0].tiers):
        left = two.do("see")
        assert (left["resident"], left["evicted"]) == (shared["resident"], shared["evicted"])
    two.do("round", "8")
    again = two.do("round", "8")
    last = two.do("see")
    assert last["engines"] == 1
    assert agrees(last, two.simple), last
    assert last["records"] == last["committed"] > size // 2
    assert [record["tokens"] for record in again] == expected
    assert cached(again) > 0
    end_of(name, two)


def is_gone(name: str, one: Pooled) -> None:
    """Let the last engine of a pool end, well, with nothing of the pool left."""
    end_of(name_of(name), one)


def end_of(pool: str, one: Pooled) -> None:
    """Let the last engine of a pool, by the pool's whole name, end as ``is_gone`` does."""
    ended = one.end()
    assert (ended["changed"], ended["left"]) == ([], False), ended
    ledger.home(pool).rmdir()
