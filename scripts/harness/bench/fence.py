#!/usr/bin/env python3
"""Measures what the fence costs a load that never hits the CPU tier, and an idle engine.

    .venv/bin/python scripts/bench-fence                     150 fours, about 9 minutes
    .venv/bin/python scripts/bench-fence --fours 10 --report docs/results/fence.json

One engine on the host device serves rounds of prompts that share nothing, with the fence and
with what kvcached does by itself: on, off, off, on, and again, and before each a round that
does not count, in which the engine gets used to the change. Four that count give one ratio;
the noise is what two neighbouring fours of the same arm differ by, and how far ratios are
apart. kvcached keeps few freed blocks, so that rounds unmap pages. Then an engine in a process
of its own is left alone, and its processor time is read twice, ten seconds apart; plain vLLM's
is read beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import provenance

HERE = Path(__file__).resolve().parent
CACHED_TOKENS = 2048
WARM_ROUNDS = 60  # the CPU tier is full by then, and evicts in every round
BLOCK_BYTES = 4 * 32 * 4 * 64 * 2 * 4  # layers, tokens, heads, head size, K and V, float32
IDLE_SECONDS = 10


def engine(model: str, plain: bool = False) -> Any:
    """An engine with a CPU tier, on elastic memory that is too small for the whole load.

    A ``plain`` one is vLLM alone.
    """
    from vllm import LLM

    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 4096 * BLOCK_BYTES,
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "kvpatch.hostdevice.offloading",
        },
    }
    return LLM(
        model,
        dtype="float32",
        max_model_len=2048,
        block_size=32,
        enforce_eager=True,
        num_gpu_blocks_override=400,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        seed=0,
        kv_transfer_config=None if plain else connector,
    )


def load(seed: int, count: int = 8) -> list[dict[str, Any]]:
    """Prompts of 320 tokens that no other round has."""
    source = random.Random(seed)
    return [
        {"prompt_token_ids": [source.randrange(2, 258) for _ in range(320)]} for _ in range(count)
    ]


class Switch:
    """Takes the fence out of a running engine that is at rest, and puts it back.

    What stays when it is out are the wrappers that find no fence, one attribute look-up each.
    """

    def __init__(self, core: Any) -> None:
        from kvpatch import connectors, fence

        self.manager = fence.manager_of(core)
        self.planner = connectors.planner(core.scheduler.connector)
        self.fence = self.manager.kvpatch_fence
        self.barrier = self.manager.physical_release_barrier
        assert self.fence is not None

    def turn(self, on: bool) -> None:
        """Let the engine go on with the fence, or without."""
        self.manager.kvpatch_fence = self.planner.kvpatch_fence = self.fence if on else None
        # Without the fence, what kvcached's own set-up decides for a synchronous engine.
        self.manager.defer_physical_release = on
        self.manager.physical_release_barrier = self.barrier if on else None


def throughput(job: dict[str, Any]) -> dict[str, Any]:
    """Each round's tokens by the clock and by the processor's time, in the order they ran."""
    import gc

    from vllm import SamplingParams

    from kvpatch.hostdevice import streams

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
    """Processor seconds of the engine's process while nobody asks for anything."""
    import psutil
    from vllm import SamplingParams

    llm = engine(job["model"], job["plain"])
    llm.generate(load(1, 8), SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    children = psutil.Process().children(recursive=True)
    time.sleep(5)  # what the load left to do is done by then
    before = sum(sum(child.cpu_times()[:2]) for child in children)
    time.sleep(IDLE_SECONDS)
    after = sum(sum(child.cpu_times()[:2]) for child in children)
    return {"cpu_seconds": round(after - before, 3), "of_seconds": IDLE_SECONDS}


def child(kind: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one engine in a process of its own."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVPATCH", "KVCACHED", "ENABLE_KVCACHED", "VLLM"))
    }
    environment = kept | {
        "KVPATCH": "0" if job.get("plain") else "1",
        "KVPATCH_HOST_DEVICE": "1GiB",
        "KVPATCH_HOST_DEVICE_DIR": str(folder),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "KVCACHED_MAX_CACHED_TOKENS": str(CACHED_TOKENS),
        # Every engine on the machine binds itself to the same core by default.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if kind == "idle" else "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    ended = subprocess.run(
        [sys.executable, __file__, "--engine", kind, folder],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if ended.returncode != 0 or not result.exists():
        sys.exit(f"the {kind} engine ended {ended.returncode}:\n{ended.stdout[-4000:]}")
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer


def main() -> int:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fours", type=int, default=150)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fours < 3:
        parser.error("--fours must be 3 or more, or the noise cannot be told")
    if options.engine:
        kind, folder = options.engine[0], Path(options.engine[1])
        result = (idle if kind == "idle" else throughput)(
            json.loads((folder / "job.json").read_text())
        )
        (folder / "result.json").write_text(json.dumps(result))
        return 0
    head = provenance.header(f"scripts/bench-fence --fours {options.fours}", HERE.parent)
    with tempfile.TemporaryDirectory(prefix="kvpatch-bench-") as name:
        folder = Path(name)
        maker = [sys.executable, HERE / "tiny_model.py", folder / "model"]
        subprocess.run(maker, check=True, capture_output=True, env=dict(os.environ, KVPATCH="0"))
        job = {"model": str(folder / "model"), "fours": options.fours}
        print(
            f"{options.fours} fours, about {2 + options.fours // 20} minutes",
            flush=True,
        )
        rounds = child("rate", job, folder)["rounds"]
        resting = {
            name: child("idle", job | {"plain": name == "plain vLLM"}, folder)
            for name in ("with the fence", "plain vLLM")
        }
    report = {**head, **compare(rounds), "idle": resting, "rounds": rounds}
    print(json.dumps({k: v for k, v in report.items() if k != "rounds"}, indent=2))
    if options.report:
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def compare(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The rate with the fence over the rate without it, and how sure that is.

    ``rounds`` are on, off, off, on, ...: what changes steadily, or every other round, is in
    both arms of a four.
    """
    said: dict[str, Any] = {"fours": len(rounds) // 4}
    for rate in ("tokens_per_second", "tokens_per_processor_second"):
        arms: dict[bool, list[float]] = {True: [], False: []}
        for begin in range(0, len(rounds), 4):
            four = rounds[begin : begin + 4]
            for fence, rates in arms.items():
                rates.append(statistics.harmonic_mean(r[rate] for r in four if r["fence"] is fence))
        on, off = arms[True], arms[False]
        said[rate] = {
            "with_over_without": about([a / b for a, b in zip(on, off, strict=True)]),
            "same_arm_twice": about([a / b for a, b in itertools.pairwise(on)]),
        }
    return said | {"pages_released_through_the_fence": sum(one["released"] for one in rounds)}


def about(ratios: list[float]) -> dict[str, float]:
    """Where a sample lies and how sure that is."""
    return {
        "mean": round(statistics.fmean(ratios), 4),
        "median": round(statistics.median(ratios), 4),
        "standard_error_of_the_mean": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 4),
    }


if __name__ == "__main__":
    sys.exit(main())
