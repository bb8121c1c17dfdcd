"""The soak: random requests, aborts, trims, shrinks and resets, in debug mode.

Run by scripts/soak. Plain vLLM computes every prompt's tokens first; then an engine
on elastic memory, too small for its load, with a CPU tier too small as well, runs for
the time that is left. Nothing may be wrong, and nothing may be left at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness import provenance

HERE = Path(__file__).resolve().parent
BLOCK = 128  # so large that a page holds 8 of them and is often wholly free
DEVICE_BLOCKS = 40  # five pages; six requests of up to 10 blocks want more
TIER_BLOCKS = 64
SLOWEST_COPY = 0.2  # seconds, some ten steps: many blocks are freed under their copies
LONGEST = 48  # tokens a request generates at most
BLOCK_BYTES = 4 * BLOCK * 4 * 64 * 2 * 4  # layers, tokens, heads, head size, K and V, float32


def prompts(seed: int) -> list[list[int]]:
    """60 prompts of up to 10 blocks; a third of them begin as another one does."""
    source = random.Random(seed)
    made: list[list[int]] = []
    for index in range(60):
        length = source.randrange(2 * BLOCK, 10 * BLOCK)
        head = source.choice(made)[: length // 2] if index % 3 == 2 else []
        made.append(head + [source.randrange(2, 258) for _ in range(length - len(head))])
    return made


def arguments(model: str, **more: Any) -> dict[str, Any]:
    """``LLM`` arguments that both engines share."""
    return {
        "model": model,
        "dtype": "float32",
        "max_model_len": 2048,
        "block_size": BLOCK,
        "enforce_eager": True,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 2048,
        "seed": 0,
        **more,
    }


def reference(job: dict[str, Any]) -> dict[str, Any]:
    """Every prompt's tokens, by plain vLLM, one prompt at a time."""
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments(job["model"], num_gpu_blocks_override=400))
    parameters = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
    return {
        "tokens": [
            list(
                llm.generate({"prompt_token_ids": prompt}, parameters, use_tqdm=False)[0]
                .outputs[0]
                .token_ids
            )
            for prompt in prompts(job["seed"])
        ]
    }


def slow_copies(seed: int) -> None:
    """Let copies take their time, as they do when a link is shared."""
    from kvpatch.hostdevice import streams

    permit, source = streams.copy_permit, random.Random(seed)

    @contextmanager
    def slowly() -> Iterator[None]:
        with permit():
            time.sleep(source.random() * SLOWEST_COPY)
            yield

    streams.copy_permit = slowly


class Soak:
    """An engine in this process and what was done to it."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": TIER_BLOCKS * BLOCK_BYTES,
                "spec_name": "HostOffloadingSpec",
                "spec_module_path": "kvpatch.hostdevice.offloading",
                "offload_prompt_only": False,
            },
        }
        self.llm = LLM(
            **arguments(
                job["model"],
                num_gpu_blocks_override=DEVICE_BLOCKS,
                kv_transfer_config=connector,
                async_scheduling=job["asynchronous"],
            )
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.manager = self.pool.kv_cache_manager
        self.source = random.Random(job["seed"])
        self.calm = False  # nobody asks for anything for a while
        self.prompts = prompts(job["seed"])
        self.truth = job["tokens"]
        self.running: dict[str, tuple[int, int]] = {}
        self.full_size = self.manager.mem_size
        self.counts = dict.fromkeys(
            ("steps", "requests", "finished", "aborted", "preempted", "trims", "shrinks", "resets"),
            0,
        )
        self.cached = self.longest_hold = 0
        self.wrong: list[dict[str, Any]] = []
        schedule = self.scheduler.schedule

        def counting(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.counts["preempted"] += len(output.preempted_req_ids or ())
            return output

        self.scheduler.schedule = counting

    def chance(self, share: float) -> bool:
        """Whether something happens that happens in this share of the steps."""
        return self.source.random() < share

    def once(self) -> None:
        """Do what users and operators do, and step."""
        if self.chance(0.02):
            self.calm = not self.calm
        if not self.calm and len(self.running) < 6 and self.chance(0.5):
            self.add()
        if self.running and self.chance(0.03):
            name = self.source.choice(sorted(self.running))
            self.engine.abort_request([name])
            del self.running[name]
            self.counts["aborted"] += 1
        if self.chance(0.02):
            self.pool.max_cached_blocks = self.source.choice((0, 0, 5, -1))
            self.counts["trims"] += 1
        if self.chance(0.01):
            pages = self.source.choice((3, 4, 5))
            self.manager.resize(min(self.full_size, pages * self.manager.page_size))
            self.manager.trim()
            self.counts["shrinks"] += 1
        if self.chance(0.005):
            self.llm.reset_prefix_cache()
            self.counts["resets"] += 1
        self.step()

    def add(self) -> None:
        """Start a request on one of the prompts; a few prompts come often."""
        from vllm import SamplingParams

        index = int(len(self.prompts) * self.source.random() ** 2)
        tokens = self.source.choice((1, 2, 3, self.source.randrange(4, LONGEST + 1)))
        name = f"{self.counts['requests']}"
        self.counts["requests"] += 1
        self.running[name] = (index, tokens)
        self.engine.add_request(
            name,
            {"prompt_token_ids": self.prompts[index]},
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        )

    def step(self) -> None:
        """Step the engine and compare what finished."""
        self.counts["steps"] += 1
        for output in self.engine.step():
            if not output.finished or output.request_id not in self.running:
                continue
            index, tokens = self.running.pop(output.request_id)
            found = list(output.outputs[0].token_ids)
            self.counts["finished"] += 1
            self.cached += output.num_cached_tokens or 0
            if found != self.truth[index][:tokens]:
                self.wrong.append(
                    {"prompt": index, "tokens": found, "plain": self.truth[index][:tokens]}
                )

    def run(self, seconds: float) -> None:
        """Go on for some time, then let everything finish."""
        begun = said = time.monotonic()
        while time.monotonic() - begun < seconds:
            self.once()
            if time.monotonic() - said > 10:
                said = time.monotonic()
                line = ", ".join(f"{count} {name}" for name, count in self.counts.items())
                print(f"soak {said - begun:5.0f} s: {line}", flush=True)
        from kvpatch.hostdevice import streams

        self.manager.resize(self.full_size)
        for _ in range(5000):
            if not self.scheduler.has_requests():
                break
            self.step()
            streams.synchronize()
        self.llm.reset_prefix_cache()

    def left(self) -> dict[str, int]:
        """What ought to be nothing once all is finished and the cache is reset."""
        from kvpatch import fence

        kept = fence.fence_of(self.core)
        assert kept is not None
        planner = self.scheduler.connector.connector_scheduler
        tier = planner.manager
        free = self.manager.available_size()
        return {
            "requests": len(self.running),
            "blocks referenced": sum(
                block.ref_cnt > 0 for block in self.pool.kv_block_pool if not block.is_null
            ),
            "blocks missing": DEVICE_BLOCKS - 1 - free,
            "blocks cached": len(self.pool._evictable_blocks),
            "pages retired": len(getattr(self.manager, "_retired_pages", None) or ()),
            "pages held": kept.holding,
            "transfers": len(kept.transfers),
            "transfers of the connector": len(planner._jobs),
            "rows of the tier pinned": len(tier._policy.blocks) - tier._num_evictable_cache_blocks,
            "rows of the tier being written": tier._num_write_pending_blocks,
        }


def soak(job: dict[str, Any]) -> dict[str, Any]:
    """Run the engine on elastic memory; a violation ends the process."""
    if job["asynchronous"]:
        sys.path.insert(0, str(HERE.parent / "tests/engine"))
        from fence_driver import allow_async_scheduling

        allow_async_scheduling()
    slow_copies(job["seed"])
    run = Soak(job)
    run.run(job["seconds"])
    from kvpatch import fence

    kept = fence.fence_of(run.core)
    assert kept is not None
    return {
        "asynchronous": run.core.batch_queue is not None,
        "counts": run.counts,
        "cached_tokens": run.cached,
        "wrong": run.wrong,
        "fence": vars(kept.counters),
        "checked": run.llm.collective_rpc(checked),
        "left": run.left(),
    }


def checked(worker: Any) -> dict[str, int]:
    """What the debug mode has checked in a worker; runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return dict(get_kv_transfer_group().connector_worker.worker.checked)


def child(kind: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one engine in a process of its own and return what it wrote.

    Raises:
        SystemExit: it died, with its last words.
    """
    ours = kind != "reference"
    log, result = folder / "log.txt", folder / "result.json"
    result.unlink(missing_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVPATCH", "KVCACHED", "ENABLE_KVCACHED", "VLLM"))
    } | {
        "KVPATCH": "1" if ours else "0",
        "KVPATCH_DEBUG": "1",
        "KVPATCH_HOST_DEVICE": "1GiB",
        "KVPATCH_HOST_DEVICE_DIR": str(folder),
        "KVCACHED_MAX_RESERVED_PAGES": "1",
        "KVCACHED_MIN_RESERVED_PAGES": "0",
        "KVCACHED_PAGE_PREALLOC_ENABLED": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Every engine on the machine binds itself to the same core by default.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONHASHSEED": "0",
    }
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, __file__, "--engine", kind, folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                stream.write(line)
                if line.startswith("soak "):
                    print(line, end="", flush=True)
        finally:
            with suppress(ProcessLookupError):
                process.kill() if sys.exc_info()[0] else None
            process.wait()
    if process.returncode != 0 or not result.exists():
        sys.exit(f"the {kind} engine ended {process.returncode}:\n{log.read_text()[-4000:]}")
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer


def main() -> int:
    """Run the soak; 0 when nothing was wrong and nothing was left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--engine", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        kind, folder = options.engine[0], Path(options.engine[1])
        job = json.loads((folder / "job.json").read_text())
        result = (reference if kind == "reference" else soak)(job)
        (folder / "result.json").write_text(json.dumps(result))
        return 0
    head = provenance.header(
        f"scripts/soak --minutes {options.minutes:g} --seed {options.seed}", HERE.parent
    )
    with tempfile.TemporaryDirectory(prefix="kvpatch-soak-") as name:
        folder = Path(name)
        model = folder / "model"
        subprocess.run(
            [sys.executable, HERE / "tiny_model.py", model], check=True, capture_output=True
        )
        job = {"model": str(model), "seed": options.seed}
        print("plain vLLM computes the tokens", flush=True)
        job |= child("reference", job, folder)
        job["seconds"] = options.minutes * 60 / 2
        runs = []
        for asynchronous in (False, True):
            print(f"{'async' if asynchronous else 'synchronous'} scheduling", flush=True)
            runs.append(child("soak", job | {"asynchronous": asynchronous}, folder))
    report = head | {"minutes": options.minutes, "seed": options.seed, "runs": runs}
    print(json.dumps(report, indent=2))
    if options.report:
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    bad = [run for run in runs if run["wrong"] or any(run["left"].values())]
    print("soak: something is wrong or left" if bad else "soak: nothing wrong, nothing left")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
