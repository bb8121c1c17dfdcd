"""scripts/bench-fence: what the fence costs a load without CPU-tier hits, and an idle engine.

    .venv/bin/python scripts/bench-fence                     150 fours, about 9 minutes
    .venv/bin/python scripts/bench-fence --fours 10 --report docs/results/fence.json

One engine on the host device serves rounds of prompts that share nothing, with the fence and
with kvcached's own release of pages: on, off, off, on, and so forth, with a warm-up round
before each. Four rounds give one ratio; the noise is the difference of neighbouring fours of
the same arm. kvcached keeps few freed blocks, so that rounds unmap pages. Then the processor
time of an idle engine is read twice, ten seconds apart, and plain vLLM's as well.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from harness import connectors, console, inprocess, processes, provenance
from harness.model_cache import kept_model
from kvpatch import state
from kvpatch.hostdevice import streams
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.upstream.connectors import scheduler_of
from kvpatch.upstream.kvcached_api import manager_of

CACHED_TOKENS = 2048
WARM_ROUNDS = 60  # the CPU tier is full by then, and evicts in every round
BLOCK_BYTES = 4 * 32 * 4 * 64 * 2 * 4  # layers, tokens, heads, head size, K and V, float32
IDLE_SECONDS = 10


def engine(model: str, plain: bool = False) -> Any:
    """An engine with a CPU tier, on elastic memory that is too small for the whole load.

    A ``plain`` one is vLLM alone.
    """
    connector = None if plain else connectors.offloading(4096 * BLOCK_BYTES)
    sizes = {"block_size": 32, "num_gpu_blocks_override": 400, "max_num_seqs": 8}
    return inprocess.engine(model, kv_transfer_config=connector, **sizes)


def load(seed: int, count: int = 8) -> list[dict[str, Any]]:
    """Prompts of 320 tokens that no other round has."""
    source = random.Random(seed)
    return [
        {"prompt_token_ids": [source.randrange(2, 258) for _ in range(320)]} for _ in range(count)
    ]


class Switch:
    """Takes the fence out of an engine without requests, and puts it back.

    Its wrappers stay, and cost one attribute look-up each.
    """

    def __init__(self, core: Any) -> None:
        self.manager = manager_of(core)
        self.planner = scheduler_of(core.scheduler.connector)
        fenced = state.find(self.manager, Fenced)
        assert fenced is not None
        self.fenced = fenced
        self.fence = fenced.fence
        self.barrier = self.manager.physical_release_barrier

    def turn(self, on: bool) -> None:
        """Continue with the fence, or without."""
        for host in (self.manager, self.planner):
            if on:
                state.attach(host, self.fenced)
            else:
                getattr(host, state.ATTRIBUTE).pop(Fenced, None)
        # Without the fence, what kvcached's own set-up decides for a synchronous engine.
        self.manager.defer_physical_release = on
        self.manager.physical_release_barrier = self.barrier if on else None


def throughput(job: dict[str, Any]) -> dict[str, Any]:
    """Each round's tokens by the clock and by the processor's time, in the order they ran."""
    from vllm import SamplingParams

    llm = engine(job["model"])
    core = llm.llm_engine.engine_core.engine_core
    assert core.batch_queue is None  # with one, kvcached has a barrier of its own to put back
    switch = Switch(core)
    parameters = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

    def run(number: int) -> dict[str, float]:
        prompts = load(number)
        gc.collect()
        begun, worked = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds, work = time.perf_counter() - begun, time.process_time() - worked
        assert all(not output.num_cached_tokens for output in outputs)
        while core.scheduler.has_requests():  # no transfer of one arm ends in the other
            streams.synchronize()
            llm.llm_engine.step()
        tokens = len(prompts) * (320 + 32)
        return {
            "tokens_per_second": round(tokens / seconds, 1),
            "tokens_per_processor_second": round(tokens / work, 1),
        }

    for number in range(WARM_ROUNDS):
        run(number)
    rounds = []
    for number in range(4 * job["fours"]):
        on = number % 4 in (0, 3)
        switch.turn(on)
        run(1_000_000 + number)
        released = switch.fence.counters.released
        rounds.append({"fence": on, **run(WARM_ROUNDS + number)})
        rounds[-1]["released"] = switch.fence.counters.released - released
    return {"rounds": rounds}


def idle(job: dict[str, Any]) -> dict[str, Any]:
    """Return the processor seconds of an engine's processes without requests."""
    from vllm import SamplingParams

    llm = engine(job["model"], job["plain"])
    llm.generate(load(1, 8), SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    children = psutil.Process().children(recursive=True)
    time.sleep(5)  # until the work after the load is done
    before = sum(sum(child.cpu_times()[:2]) for child in children)
    time.sleep(IDLE_SECONDS)
    after = sum(sum(child.cpu_times()[:2]) for child in children)
    return {"cpu_seconds": round(after - before, 3), "of_seconds": IDLE_SECONDS}


def main() -> int:
    """Measure, print and write the result."""
    parser = console.parser("scripts/bench-fence", __doc__ or "")
    parser.add_argument("--fours", type=int, default=150)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if options.fours < 3:
        parser.error("--fours must be 3 or more: fewer give no noise")
    return console.run(console.Screen("bench-fence"), lambda: measure(options))


def measure(options: argparse.Namespace) -> int:
    """Run the three engines and write their results."""
    head = provenance.header(f"scripts/bench-fence --fours {options.fours}")
    job = {"model": str(kept_model(7, print)), "fours": options.fours}
    with tempfile.TemporaryDirectory(prefix="kvpatch-bench-") as name:
        folder = Path(name)
        environment = processes.on_host_device(
            folder,
            KVPATCH="1",
            KVCACHED_MAX_CACHED_TOKENS=str(CACHED_TOKENS),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            **processes.ONE_THREAD,
        )
        print(f"{options.fours} fours, about {2 + options.fours // 20} minutes", flush=True)
        rounds = processes.call("harness.bench.fence:throughput", job, folder, environment)[
            "rounds"
        ]
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        resting = {}
        for kind, on in (("with the fence", "1"), ("plain vLLM", "0")):
            environment["KVPATCH"] = on
            own = job | {"plain": on == "0"}
            resting[kind] = processes.call("harness.bench.fence:idle", own, folder, environment)
    report = {**head, **compare(rounds), "idle": resting}
    print(json.dumps(report, indent=1))
    if options.report:
        provenance.write(report | {"rounds": rounds}, options.report)
    return 0


def compare(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rate with the fence over the rate without it, with its standard error.

    ``rounds`` are on, off, off, on, ...: a steady drift, or one of every other round, is the
    same in both arms of a four.
    """
    found: dict[str, Any] = {"fours": len(rounds) // 4}
    for rate in ("tokens_per_second", "tokens_per_processor_second"):
        arms: dict[bool, list[float]] = {True: [], False: []}
        for begin in range(0, len(rounds), 4):
            four = rounds[begin : begin + 4]
            for fenced, rates in arms.items():
                rates.append(
                    statistics.harmonic_mean(r[rate] for r in four if r["fence"] is fenced)
                )
        on, off = arms[True], arms[False]
        found[rate] = {
            "with_over_without": about([a / b for a, b in zip(on, off, strict=True)]),
            "same_arm_twice": about([a / b for a, b in itertools.pairwise(on)]),
        }
    return found | {"pages_released_through_the_fence": sum(one["released"] for one in rounds)}


def about(ratios: list[float]) -> dict[str, float]:
    """Return mean, median and standard error of a sample."""
    return {
        "mean": round(statistics.fmean(ratios), 4),
        "median": round(statistics.median(ratios), 4),
        "standard_error_of_the_mean": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 4),
    }
