"""The engine arms on a GPU: interleaved, each engine in a process of its own.

A small model with random weights, in bfloat16, with vLLM's Triton attention. The loads are those
of scripts/bench, through ``LLM`` and without a server.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import asdict
from pathlib import Path

from harness import processes, provenance
from harness.bench.arms import connector_config
from harness.bench.loads import conversations, no_reuse
from harness.bench.one_model import turns
from harness.bench.sizes import BLOCK_TOKENS, LAYERS, Size
from harness.console import HarnessError
from harness.model_cache import kept_model

SIZE = Size(blocks=2048, tier_blocks=16384, prompt=8192, prompts=16, conversations=12, together=4)
ARMS: dict[str, tuple[dict[str, str], str]] = {
    "plain vLLM": ({"KVPATCH": "0"}, ""),
    "vLLM + offloading": ({"KVPATCH": "0"}, "offloading"),
    "vLLM + simple eager": ({"KVPATCH": "0"}, "simple eager"),
    "vLLM + simple lazy": ({"KVPATCH": "0"}, "simple lazy"),
    "kvcached alone": ({"KVPATCH": "0", "ENABLE_KVCACHED": "1", "KVCACHED_AUTOPATCH": "1"}, ""),
    "kvcached + kvpatch": ({"KVPATCH": "1"}, "offloading"),
    "kvcached + kvpatch, again": ({"KVPATCH": "1"}, "offloading"),
    "kvcached + kvpatch, simple eager": ({"KVPATCH": "1"}, "simple eager"),
    "kvcached + kvpatch, simple lazy": ({"KVPATCH": "1"}, "simple lazy"),
}


TIER_BYTES = SIZE.tier_blocks * LAYERS * BLOCK_TOKENS * 4 * 64 * 2 * 2  # KV heads, ..., bfloat16


def tokens(hashes: tuple[int, ...]) -> list[int]:
    """Return a prompt's tokens: those of a block follow from its hash."""
    made: list[int] = []
    for number in hashes:
        source = random.Random(number)
        made += [source.randrange(2, 258) for _ in range(BLOCK_TOKENS)]
    return made


def engine(job: processes.Job) -> processes.Job:
    """Run every load of one repeat on one engine, in this process."""
    if os.environ["KVPATCH"] == "1":
        import kvpatch  # noqa: F401  before vllm
    from vllm import LLM, SamplingParams

    begun = time.monotonic()
    llm = LLM(
        job["model"],
        dtype="bfloat16",
        max_model_len=12288,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        num_gpu_blocks_override=SIZE.blocks,
        gpu_memory_utilization=0.5,
        max_num_seqs=SIZE.together,
        seed=0,
        attention_backend="TRITON_ATTN",
        kv_transfer_config=connector_config(job["connector"], TIER_BYTES)
        if job["connector"]
        else None,
    )
    found: processes.Job = {"start_seconds": round(time.monotonic() - begun, 1)}
    for load in (no_reuse(SIZE, 1000), no_reuse(SIZE, job["repeat"]), conversations(SIZE, 0)):
        prompts = [{"prompt_token_ids": tokens(prompt.hashes)} for prompt in load.prompts]
        sampling = SamplingParams(temperature=0, max_tokens=SIZE.answer, ignore_eos=True)
        begun = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        total = sum(prompt.tokens + prompt.answer for prompt in load.prompts)
        # The first pass of the load without reuse warms up; the second overwrites it.
        found[load.name] = {
            "total_tokens_per_second": round(total / seconds, 1),
            "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        }
    return found


def engine_environment(**changes: str) -> dict[str, str]:
    """Return the environment of an engine on the GPU."""
    kept = {name: os.environ[name] for name in ("KVPATCH_ALLOW_VLLM",) if name in os.environ}
    return processes.with_harness(VLLM_ENABLE_V1_MULTIPROCESSING="0", **kept, **changes)


def run(repeats: int, folder: Path, output: Path) -> int:
    """Run all arms and write the result file after each engine."""
    result = provenance.header("scripts/gpu arms", "one NVIDIA GPU")
    result |= {"size": asdict(SIZE), "runs": {name: [] for name in ARMS}}
    model = str(kept_model(7, print))
    failed = set()
    for repeat in range(repeats):
        for arm in turns(list(ARMS), repeat):
            environment, offload = ARMS[arm]
            job = {"model": model, "connector": offload, "repeat": repeat}
            try:
                found = processes.call(
                    "harness.gpu.arms:engine", job, folder, engine_environment(**environment)
                )
            except HarnessError as error:
                found = {"failed": str(error).splitlines()[-3:]}
                failed.add(arm)
            result["runs"][arm].append(found)
            print(f"repeat {repeat + 1}, {arm}: {json.dumps(found)}", flush=True)
            provenance.write(result, output)
    if failed:
        raise HarnessError(f"these arms failed: {', '.join(sorted(failed))}")
    return 0
