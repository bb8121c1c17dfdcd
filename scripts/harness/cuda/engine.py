"""Runs in an environment of ``environment`` on the emulated device: engines, through loads.

    python engine.py JOBS.json RESULTS.json

It imports vLLM once, and each job is a fork of it. It is run by its path, so that neither the
harness nor the checkout's kvpatch is there. A job is one engine. In each of its rounds, under
delays of its own, prompts are computed and stored, come back from the tier, and once more one by
one, when the bytes of each block are compared with those of plain vLLM.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["PYTHONHASHSEED"] = "0"  # blocks are compared between engines by their hashes

REST = 100  # steps in which an engine comes to rest
STALLED = 1000  # steps in which no request ends
PATIENCE = 60.0  # seconds, and more of those steps until they are over
FAR = 0.002  # of the numbers of a block: one token of one layer is 0.008

# What runs in workers.


def device() -> Any:
    """Return the emulated device of this process."""
    library = ctypes.CDLL("libcuda.so.1")
    library.emu_complaint.restype = ctypes.c_char_p
    library.emu_complaint.argtypes = (ctypes.c_size_t,)
    return library


def complaints(worker: Any) -> list[str]:
    """Return what the device of a worker had to complain of so far."""
    one = device()
    return [one.emu_complaint(index).decode() for index in range(one.emu_count(4))]


def counts(worker: Any) -> dict[str, int]:
    """Return what the device of a worker was asked for so far."""
    names = ("maps", "unmaps", "batches", "copies")
    return {name: device().emu_count(index) for index, name in enumerate(names)}


def delay(worker: Any, kind: int, seed: int) -> None:
    """Let the work of a worker's device be late, in one of the ways that ``work.h`` has."""
    device().emu_delay(kind, seed)


def wait(worker: Any) -> None:
    """Wait for a worker's device."""
    import torch

    torch.cuda.synchronize()


def read(worker: Any, wanted: list[tuple[int, int]]) -> list[Any]:
    """Return (group, block) pairs as the model has them: all layers, as float32."""
    import numpy as np

    context = worker.model_runner.compilation_config.static_forward_context
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    found = []
    for group, block in wanted:
        layers = [context[name].kv_cache for name in groups[group].layer_names]
        layers = [one[0] if isinstance(one, list) else one for one in layers]
        parts = [one[:, block] if one.shape[0] == 2 else one[block] for one in layers]
        found.append(np.concatenate([one.float().cpu().numpy().ravel() for one in parts]))
    return found


def libraries(worker: Any) -> list[str]:
    """Return the libraries that a worker's process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if ".so" in line})


def steps(least: int) -> Iterator[int]:
    """Count steps as ``harness.engines.patience`` does, which is not there: more until it is over.

    Beside other work on a machine steps without a request go on while the threads that copy wait.
    """
    end = time.monotonic() + PATIENCE
    for count in itertools.count():
        if count >= least and time.monotonic() >= end:
            return
        yield count


class Stage:
    """An engine in this process, driven step by step."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        begun = time.monotonic()
        self.job = job
        self.llm = LLM(job["model"], **job["engine"])
        self.seconds = time.monotonic() - begun
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.pool = self.core.scheduler.kv_cache_manager.block_pool
        self.truth: dict[str, Any] = {}
        self.asked = 0

    def ask(self, prompts: list[list[int]], tokens: list[int]) -> list[dict[str, Any]]:
        """Answer prompts together; return the tokens of each, and how many were not computed."""
        from vllm import SamplingParams

        self.asked += 1
        for index, (prompt, count) in enumerate(zip(prompts, tokens, strict=True)):
            wanted = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            given = {"prompt_token_ids": prompt}
            self.engine.add_request(f"{self.asked}-{index}", given, wanted)
        answers: dict[int, Any] = {}
        patience = steps(STALLED)
        while self.engine.has_unfinished_requests():
            assert next(patience, None) is not None, "requests wait for ever"
            for output in self.engine.step():
                if output.finished:
                    patience = steps(STALLED)
                    answers[int(output.request_id.split("-")[1])] = {
                        "tokens": list(output.outputs[0].token_ids),
                        "cached": output.num_cached_tokens,
                    }
        return [answers[index] for index in range(len(prompts))]

    def rest(self, waits: bool = True) -> None:
        """Step until what was asked for is done, copies too; without ``waits``, only by steps."""
        for _ in steps(REST if waits else STALLED):
            if waits:
                self.core.model_executor.collective_rpc(wait)
            if not self.core.scheduler.has_requests():
                return
            self.engine.step()
        raise AssertionError("the engine did not come to rest")

    def reset(self, **how: bool) -> None:
        """Empty the prefix cache, with ``reset_connector`` the tier too."""
        for _ in steps(REST):
            self.rest()
            if self.llm.reset_prefix_cache(**how):
                return
            self.engine.step()
        raise AssertionError("the prefix cache was not reset")

    def blocks(self) -> dict[str, Any]:
        """Return the bytes of all blocks of the prefix cache, by rank and hash."""
        pool = getattr(self.pool, "kv_block_pool", None) or self.pool.blocks
        here = {one.block_hash: one.block_id for one in pool if one.block_hash is not None}
        wanted = [(int.from_bytes(key[-4:], "big"), block) for key, block in here.items()]
        ranks = self.core.model_executor.collective_rpc(read, args=(wanted,))
        return {
            f"{rank}:{key.hex()}": found
            for rank, each in enumerate(ranks)
            for key, found in zip(here, each, strict=True)
        }

    def compare(self) -> dict[str, int]:
        """Compare the blocks of the prefix cache with those of plain vLLM."""
        import numpy as np

        verdict = dict.fromkeys(("equal", "close", "wrong", "unknown"), 0)
        for key, found in self.blocks().items():
            expected = self.truth.get(key)
            if expected is None:
                verdict["unknown"] += 1
            elif np.array_equal(found, expected):
                verdict["equal"] += 1
            else:  # a prompt computed in other company differs in the last digits of bfloat16
                far = ~np.isclose(found, expected, atol=0.05, rtol=0.05)
                verdict["close" if far.mean() < FAR else "wrong"] += 1
        return verdict

    def abandon(self, prompt: list[int]) -> None:
        """Begin an answer, and abort it while the device computes more of it."""
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        self.engine.add_request("abandoned", {"prompt_token_ids": prompt}, wanted)
        while not any(output.outputs[0].token_ids for output in self.engine.step()):
            pass
        self.engine.abort_request(["abandoned"])

    def one_by_one(
        self, prompts: list[list[int]], expected: list[list[int]], behind: list[list[int]]
    ) -> dict[str, Any]:
        """Answer one prompt after another, and look at the blocks of each.

        Args:
            behind: prompts of which one is abandoned just before each.
        """
        total = dict.fromkeys(("equal", "close", "wrong", "unknown", "cached", "wrong answers"), 0)
        for index, prompt in enumerate(prompts):
            self.reset()
            if behind:
                self.abandon(behind[index])
            (answer,) = self.ask([prompt], [1])
            total["cached"] += answer["cached"]
            total["wrong answers"] += answer["tokens"] != expected[index][:1]
            self.rest()
            for name, count in self.compare().items():
                total[name] += count
        return total


def plain(stage: Stage) -> dict[str, Any]:
    """What plain vLLM answers, and the bytes of its blocks; for the jobs to compare with."""
    import numpy as np

    job = stage.job
    answers = stage.ask(job["prompts"], job["max_tokens"])
    stage.rest()
    stage.truth = stage.blocks()
    np.savez(job["truth"], **stage.truth)
    return {"tokens": [one["tokens"] for one in answers], "blocks": len(stage.truth)}


def rounds(
    stage: Stage, load: Callable[[Stage, list[list[int]]], dict[str, Any]]
) -> dict[str, Any]:
    """Rounds of stores and loads, each under delays of its own."""
    import numpy as np

    job = stage.job
    stage.truth = dict(np.load(job["truth"]))
    expected = json.loads(Path(job["answers"]).read_text())["tokens"]
    found = []
    every = stage.core.model_executor.collective_rpc
    for kind, seed in job["rounds"]:
        begun, before = time.monotonic(), [len(one) for one in every(complaints)]
        stage.reset(**job["reset"])
        every(delay, args=(job["delays"].index(kind), seed))
        looked = load(stage, expected)
        new = [one[old:] for one, old in zip(every(complaints), before, strict=True)]
        found.append(
            {
                "delays": kind,
                "seed": seed,
                "wrong answers": looked.pop("wrong answers"),
                "restored": looked.pop("cached"),
                "blocks": looked,
                "complaints": [one for of_rank in new for one in of_rank][:5],
                "complained": sum(map(len, new)),
                "seconds": round(time.monotonic() - begun, 1),
            }
        )
        print("round", json.dumps(found[-1])[:300], flush=True)
    return {"rounds": found}


def through(stage: Stage, between: Callable[[], object]) -> dict[str, Any]:
    """Rounds of all prompts together before something and behind it; some once more one by one."""

    def load(stage: Stage, expected: list[list[int]]) -> dict[str, Any]:
        job = stage.job
        first = stage.ask(job["prompts"], job["max_tokens"])
        between()
        second = stage.ask(job["prompts"], job["max_tokens"])
        looked = stage.one_by_one(job["prompts"][: job["looked_at"]], expected, [])
        for one, tokens in zip(first + second, expected * 2, strict=True):
            looked["wrong answers"] += one["tokens"] != tokens
        looked["cached"] += sum(one["cached"] for one in second)
        return looked

    return rounds(stage, load)


def offloaded(stage: Stage) -> dict[str, Any]:
    """Prompts are computed, and come back from the tier."""
    return through(stage, stage.reset)


def slept(stage: Stage) -> dict[str, Any]:
    """Prompts before a sleep and behind it; level 2 drops the weights, which are loaded again."""

    def sleep() -> None:
        stage.llm.sleep(level=stage.job["level"])
        stage.llm.wake_up()
        if stage.job["level"] == 2:
            stage.llm.collective_rpc("reload_weights")

    return through(stage, sleep)


def hurried(stage: Stage) -> dict[str, Any]:
    """Requests end with their first token, and their pages are unmapped behind them; they come
    back from the tier into blocks of others, which were aborted just before.
    """

    def load(stage: Stage, expected: list[list[int]]) -> dict[str, Any]:
        looked = stage.job["prompts"][: stage.job["looked_at"]]
        cap = stage.pool.max_cached_blocks
        stage.pool.max_cached_blocks = 0
        stage.ask(looked, [1] * len(looked))  # one alone is in the page of block 0, which stays
        stage.rest(waits=False)
        stage.pool.max_cached_blocks = cap
        return stage.one_by_one(looked, expected, stage.job["prompts"][-len(looked) :])

    return rounds(stage, load)


STEPS = {step.__name__: step for step in (plain, offloaded, hurried, slept)}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in this process; return what it came to."""
    try:
        if "lift" in job:
            from kvpatch.status import record

            record.lifted |= frozenset(job["lift"])
        if "revert" in job:
            from kvpatch import activation

            for row in job["revert"]:
                assert activation.transaction.revert(row), f"{row} cannot be taken out"
        stage = Stage(job)
        found = STEPS[job["step"]](stage)
        every = stage.core.model_executor.collective_rpc
        used = resource.getrusage(resource.RUSAGE_SELF)
        return found | {
            "start seconds": round(stage.seconds, 1),
            "processor seconds": round(used.ru_utime + used.ru_stime, 1),
            "counts": every(counts)[0],
            "libraries": sorted(set().union(*every(libraries))),
        }
    except BaseException as error:
        said = "".join(traceback.format_exception_only(error)).strip()
        return {"ended": said, "trace": "".join(traceback.format_exception(error))[-6000:]}


def forked(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a fork, with a log of its own; return what it came to."""
    begun = time.monotonic()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.alarm(job["seconds"])  # a step of vLLM's may not end
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nor outlive who asked
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        found = run(job)
        with os.fdopen(writing, "w") as file:
            json.dump(found, file)
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    status = os.waitpid(pid, 0)[1]
    found = json.loads(text) if text else {"ended": f"status {status}", "trace": ""}
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def main(jobs: str, results: str) -> None:
    """Run the jobs, one after another."""
    begun = time.monotonic()
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    found: dict[str, Any] = {}
    imported = time.monotonic() - begun
    for name, job in json.loads(Path(jobs).read_text()).items():
        found[name] = forked(name, job)
        head = {"imported": round(imported, 1)}
        Path(results).write_text(json.dumps(head | {"jobs": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
