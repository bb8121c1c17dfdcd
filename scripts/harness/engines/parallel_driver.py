"""Runs the engines of one data parallel server through one job, and writes down what each did.

A job is one of ``driver``, whose prompts have a ``rank``: that of the engine that is asked. Engines
are in processes of their own, and so are their workers: what they keep is read from their status
pages, and restored bytes are compared by debug mode, in which an engine that loads others ends.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to call a function in the workers

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from harness.engines.placement import fork_workers
from harness.engines.prompting import answer_of, params_of, prompt_of, runner_of
from harness.engines.scheduling import allow_async_scheduling
from kvpatch import activation
from kvpatch.patches.debug import audit
from kvpatch.status import record
from kvpatch.telemetry import reader

LOOK = 0.5  # seconds, the interval in which pages are written
LOOKS = 240
QUIET = 4  # looks in a row that see no change


async def answer(llm: Any, name: str, prompt: dict[str, Any]) -> dict[str, Any]:
    """Let one engine answer a prompt; return its record, as ``driver`` has it."""
    model = llm.vllm_config.model_config
    asked = prompt_of(model, prompt), params_of(model, prompt), name
    outputs = [one async for one in llm.generate(*asked, data_parallel_rank=prompt["rank"])]
    return answer_of(outputs[-1])


async def ask(llm: Any, name: str, prompts: list[dict[str, Any]], engines: int) -> list[list[Any]]:
    """Ask prompts together; return the records of each engine, in the order of its prompts."""
    records = await asyncio.gather(
        *(answer(llm, f"{name}-{number}", prompt) for number, prompt in enumerate(prompts))
    )
    asked = [prompt["rank"] for prompt in prompts]
    return [
        [record for rank, record in zip(asked, records, strict=True) if rank == engine]
        for engine in range(engines)
    ]


def pages() -> list[dict[str, Any]]:
    """Return what each engine of this process publishes, in the order of their ranks."""
    found = [page.content["engine"] for page in reader.engines_of([os.getpid()])]
    return sorted(found, key=lambda engine: int(engine["index"]))


async def come_to_rest(engines: int) -> list[dict[str, Any]]:
    """Wait until no engine has anything to do; return what they publish then."""
    seen: list[Any] = []
    for _ in range(LOOKS):
        await asyncio.sleep(LOOK)
        found = pages()
        assert len(found) == engines, f"{len(found)} engines publish: {found}"
        idle = all(
            not any(one["requests"].values()) and not (one["fence"] or {}).get("holding")
            for one in found
        )
        what = [(one["steps"], one["bytes"], one["tiers"], one["disks"]) for one in found]
        seen = [*seen, what] if idle and seen[-1:] in ([], [what]) else []
        if len(seen) >= QUIET:
            return found
    raise AssertionError(f"the engines did not come to rest in {LOOK * LOOKS:g} s: {pages()}")


async def checked(llm: Any) -> list[list[dict[str, int]]]:
    """Return what debug mode checked in the workers of each engine."""
    client = llm.engine_core
    return [
        await client._call_utility_async(
            "collective_rpc", audit.checked, None, (), {}, engine=identity
        )
        for identity in client.core_engines
    ]


async def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a job; return the result of each engine."""
    arguments = dict(job["engine"])
    if transfer := arguments.pop("kv_transfer_config", None):
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    if arguments.get("async_scheduling"):
        allow_async_scheduling()
    count = int(arguments["data_parallel_size"])
    ours = os.environ.get("KVPATCH", "0") != "0"
    record.lifted = frozenset(job.get("forced", ()))  # also in the engines, which are forks
    fork_workers()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=job["model"], **arguments))
    try:
        config = llm.vllm_config
        common = {
            "patches": [applied.patch.id for applied in activation.transaction.applied],
            "async": bool(config.scheduler_config.async_scheduling),
            "runner": runner_of(config),
        }
        engines: list[dict[str, Any]] = [{**common, "rounds": []} for _ in range(count)]
        for index, prompts in enumerate(job["rounds"]):
            each = await ask(llm, f"round-{index}", prompts, count)
            for engine, records in zip(engines, each, strict=True):
                engine["rounds"].append(records)
            if ours:
                await come_to_rest(count)
        each = await ask(llm, "crossed", job["crossed"], count)
        for engine, records in zip(engines, each, strict=True):
            engine["crossed"] = records
        if ours:
            for engine, page in zip(engines, await come_to_rest(count), strict=True):
                engine.update({name: page[name] for name in ("pool", "elastic", "fence")})
            for engine, found in zip(engines, await checked(llm), strict=True):
                engine["checked"] = found
        return engines
    finally:
        llm.shutdown()


def main(job_path: str, result_path: str) -> None:
    """Run one job."""
    job = json.loads(Path(job_path).read_text())
    result = {"engines": asyncio.run(run(job))}
    Path(result_path).write_text(json.dumps(result))
