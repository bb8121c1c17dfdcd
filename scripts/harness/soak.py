"""scripts/soak: everything that frees blocks, at random, in debug mode, against plain vLLM.

    scripts/soak                20 minutes, half with synchronous, half with async scheduling
    scripts/soak --minutes 2    a short one
    scripts/soak --seed 5       another sequence

Plain vLLM generates the tokens of all prompts first. Then an engine on elastic memory, with a
device and a CPU tier too small for its load, runs random requests, aborts, trims, shrinks and
resets, while copies are held and neighbours take the device's memory and leave. All tokens must be
equal, and at the end no block, page, transfer, descriptor or thread may be left, and no memory.
"""

import argparse
import ctypes
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from harness import connectors, console, processes, provenance
from harness.engines.runs import related
from harness.model_cache import kept_model
from harness.neighbour import Neighbour
from kvpatch.hostdevice import ledger, streams
from kvpatch.patches.fence.hooks import fence_of

BLOCK = 128  # so large that a page holds 8 of them and is often wholly free
DEVICE_BLOCKS = 40  # five pages; six requests of up to 10 blocks want more
TIER_BLOCKS = 64
SLOWEST_COPY = 0.2  # seconds, some ten steps: many blocks are freed under their copies
LONGEST_HOLD = 1.0  # seconds in which no copy runs
WARM = 0.2  # of the time, until descriptors, threads and memory are counted
GROWTH = 16 << 20  # bytes of the process's memory that are not taken for a leak
# oneDNN keeps a compiled kernel, some 100 KiB, for each of the last 1024 shapes of a step.
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8"}
COUNTED = (
    *("steps", "requests", "finished", "aborted", "preempted"),
    *("trims", "shrinks", "resets", "holds", "neighbours"),
)
LONGEST = 48  # tokens a request generates at most
BLOCK_BYTES = 4 * BLOCK * 4 * 64 * 2 * 4  # layers, tokens, heads, head size, K and V, float32


def prompts(seed: int) -> list[list[int]]:
    """Return 60 prompts of up to 10 blocks, some of which share a prefix."""
    return related(random.Random(seed), 60, 2 * BLOCK, 10 * BLOCK)


def engine(model: str, blocks: int, **more: Any) -> Any:
    """Return an engine of so many blocks, in float32, which gives the same tokens each time."""
    from vllm import LLM

    sizes = {"block_size": BLOCK, "num_gpu_blocks_override": blocks, "max_num_seqs": 6}
    longest = {"max_model_len": 2048, "max_num_batched_tokens": 2048}
    return LLM(model, dtype="float32", seed=0, enforce_eager=True, **longest, **sizes, **more)


def reference(job: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens that plain vLLM generates for each prompt, one at a time."""
    from vllm import SamplingParams

    llm = engine(job["model"], 400)
    parameters = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
    tokens = []
    for prompt in prompts(job["seed"]):
        (one,) = llm.generate({"prompt_token_ids": prompt}, parameters, use_tqdm=False)
        tokens.append(list(one.outputs[0].token_ids))
    return {"tokens": tokens}


def slow_copies(seed: int) -> None:
    """Slow copies down at random, as on a shared link."""
    permit, source = ledger.copy_permit, random.Random(seed)

    @contextmanager
    def slowly() -> Iterator[None]:
        with permit():
            time.sleep(source.random() * SLOWEST_COPY)
            yield

    streams.copy_permit = slowly  # type: ignore[attr-defined]


class Soak:
    """An engine in this process, its operations and their counts."""

    def __init__(self, job: dict[str, Any]) -> None:
        from harness.engines.inside import after

        self.llm = engine(
            job["model"],
            DEVICE_BLOCKS,
            kv_transfer_config=connectors.offloading(
                TIER_BLOCKS * BLOCK_BYTES, offload_prompt_only=False
            ),
            async_scheduling=job["asynchronous"],
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.manager = self.pool.kv_cache_manager
        self.source = random.Random(job["seed"])
        self.calm = False  # no new requests for a while
        self.prompts = prompts(job["seed"])
        self.truth = job["tokens"]
        self.running: dict[str, tuple[int, int]] = {}
        self.full_size = self.manager.mem_size
        self.counts = dict.fromkeys(COUNTED, 0)
        self.process = psutil.Process()
        self.holder: threading.Thread | None = None  # of copies
        self.neighbour: Neighbour | None = None
        self.warm: dict[str, int] = {}
        self.wrong: list[dict[str, Any]] = []
        after(self.scheduler, "schedule", self._scheduled)

    def _scheduled(self, output: Any, *args: Any, **kwargs: Any) -> None:
        self.counts["preempted"] += len(output.preempted_req_ids or ())

    def chance(self, share: float) -> bool:
        """Return whether to do what happens in this share of the steps."""
        return self.source.random() < share

    def once(self) -> None:
        """Do operations of users and operators at random, and step."""
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
        if self.chance(0.01):
            self.hold(self.source.random() * LONGEST_HOLD)
        if self.chance(0.01 if self.neighbour is None else 0.02):
            self.neighbours()
        self.step()

    def hold(self, seconds: float) -> None:
        """Hold all copies for some time, which the engine may spend waiting for one."""
        if self.holder is not None:
            self.holder.join()

        def hold() -> None:
            with ledger.hold_copies():
                time.sleep(seconds)

        self.holder = threading.Thread(target=hold)
        self.holder.start()
        self.counts["holds"] += 1

    def neighbours(self) -> None:
        """Let a neighbour take almost all that is free of the device, or the one there leave."""
        if self.neighbour is not None:
            self.neighbour.leave(killed=self.chance(0.5))
            self.neighbour = None
            return
        free, _ = ledger.memory()
        spare = self.source.randrange(3) * self.manager.page_size
        if free > spare:
            self.neighbour = Neighbour(free - spare)
            self.counts["neighbours"] += 1

    def resources(self) -> dict[str, int]:
        """Return what this process has of the system, without neighbours and holds."""
        if self.neighbour is not None:
            self.neighbours()
        if self.holder is not None:
            self.holder.join()
        ctypes.CDLL(None).malloc_trim(0)
        memory = self.process.memory_info()
        tier = self.scheduler.connector.connector_scheduler.manager
        unwritten = (TIER_BLOCKS - tier._num_allocated_chunks) * BLOCK_BYTES
        return {
            "descriptors": self.process.num_fds(),
            # vLLM keeps the streams that it once needed, and each is a thread here.
            "threads": len(set(threading.enumerate()) - set(streams._threads)),
            "native threads": self.process.num_threads() - threading.active_count(),
            # Not what it shares with the device. Pages come as they are first written; those of
            # the tier count from the beginning.
            "bytes": memory.rss - memory.shared + unwritten,
        }

    def add(self) -> None:
        """Start a request with one of the prompts, some of them more often than others."""
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
        """Step the engine and compare the finished requests."""
        self.counts["steps"] += 1
        for output in self.engine.step():
            if not output.finished or output.request_id not in self.running:
                continue
            index, tokens = self.running.pop(output.request_id)
            found = list(output.outputs[0].token_ids)
            self.counts["finished"] += 1
            if found != self.truth[index][:tokens]:
                self.wrong.append(
                    {"prompt": index, "tokens": found, "plain": self.truth[index][:tokens]}
                )

    def run(self, seconds: float) -> None:
        """Run operations for some time, then let all requests finish.

        On a slow machine, whose steps are few, up to ten times as long until each kind has run.
        """
        begun = reported = time.monotonic()
        while (taken := time.monotonic() - begun) < seconds or (
            taken < 10 * seconds and not all(self.counts.values())
        ):
            self.once()
            if not self.warm and time.monotonic() - begun > WARM * seconds:
                self.warm = self.resources()
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                line = ", ".join(f"{count} {name}" for name, count in self.counts.items())
                print(f"soak {reported - begun:5.0f} s: {line}", flush=True)
        if self.neighbour is not None:
            self.neighbours()
        self.manager.resize(self.full_size)
        for _ in range(5000):
            if not self.scheduler.has_requests():
                break
            self.step()
            streams.synchronize()
        self.llm.reset_prefix_cache()

    def left(self) -> dict[str, int]:
        """Return what must be 0 once all is finished and the prefix cache is reset."""
        import torch

        kept = fence_of(self.core)
        assert kept is not None
        planner = self.scheduler.connector.connector_scheduler
        tier = planner.manager
        free = self.manager.available_size()
        now = self.resources()
        # With a stream's first large copy OpenMP starts a team for its thread.
        teams = len(streams._threads) * (torch.get_num_threads() - 1)
        return {
            "descriptors": max(0, now["descriptors"] - self.warm["descriptors"]),
            "threads": max(0, now["threads"] - self.warm["threads"]),
            "native threads over the teams of the streams": max(
                0, now["native threads"] - self.warm["native threads"] - teams
            ),
            "memory over the allowance": max(0, now["bytes"] - self.warm["bytes"] - GROWTH),
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
            "chunks of the tier pinned": (
                tier._num_allocated_chunks - len(tier._free_list) - tier._num_evictable_cache_chunks
            ),
            "chunks of the tier being written": tier._num_write_pending_chunks,
        }


def soak(job: dict[str, Any]) -> dict[str, Any]:
    """Run the engine on elastic memory; a violation ends the process."""
    if job["asynchronous"]:
        from harness.engines.scheduling import allow_async_scheduling

        allow_async_scheduling()
    slow_copies(job["seed"])
    running = Soak(job)
    running.run(job["seconds"])
    kept = fence_of(running.core)
    assert kept is not None
    return {
        "asynchronous": running.core.batch_queue is not None,
        "counts": running.counts,
        "wrong": running.wrong,
        "fence": vars(kept.counters),
        "checked": running.llm.collective_rpc(checked),
        "resources": {"warm": running.warm, "end": running.resources()},
        "left": running.left(),
    }


def checked(worker: Any) -> dict[str, int]:
    """Return what debug mode has checked; runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return dict(get_kv_transfer_group().connector_worker.worker.checked)


def main() -> int:
    """Run the soak; 0 when nothing was wrong and nothing was left."""
    parser = console.parser("scripts/soak", __doc__ or "")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="write the figures there, as JSON")
    options = parser.parse_args()
    return console.run(console.Screen("soak"), lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Run the three engines and write their results."""
    command = f"scripts/soak --minutes {options.minutes:g} --seed {options.seed}"
    report = provenance.header(command) | {"minutes": options.minutes, "seed": options.seed}
    with tempfile.TemporaryDirectory(prefix="kvpatch-soak-") as name:
        folder = Path(name)
        environment = processes.on_host_device(
            folder,
            KVPATCH="1",
            KVPATCH_DEBUG="1",
            KVCACHED_MAX_RESERVED_PAGES="1",
            KVCACHED_MIN_RESERVED_PAGES="0",
            KVCACHED_PAGE_PREALLOC_ENABLED="false",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            PYTHONHASHSEED="0",
            **processes.ONE_THREAD,
            **KERNELS,
        )
        job = {"model": str(kept_model(7, print)), "seed": options.seed}
        print("tokens of plain vLLM", flush=True)
        job |= processes.call("harness.soak:reference", job, folder, environment | {"KVPATCH": "0"})
        job["seconds"] = options.minutes * 60 / 2
        report["runs"] = []
        for asynchronous in (False, True):
            print(f"{'async' if asynchronous else 'synchronous'} scheduling", flush=True)
            job["asynchronous"] = asynchronous
            found = processes.call("harness.soak:soak", job, folder, environment, follow="soak ")
            report["runs"].append(found)
    print(json.dumps(report, indent=1))
    if options.report:
        provenance.write(report, options.report)
    bad = any(one["wrong"] or any(one["left"].values()) for one in report["runs"])
    print("soak: something is wrong or left" if bad else "soak: nothing wrong, nothing left")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
