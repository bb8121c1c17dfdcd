"""The engine arms on a GPU: interleaved, each engine in a process of its own.

    python arms.py --output FILE [--repeats 5]

A small model with random weights, in bfloat16, with vLLM's Triton attention, offline: the packs
hold no server. The loads are those of scripts/bench.
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parent
sys.path[:0] = [str(HERE), str(SCRIPTS), str(SCRIPTS.parent)]

from harness.bench.sizes import BLOCK_TOKENS, Size  # noqa: E402

SIZE = Size(blocks=2048, tier_blocks=16384, prompt=8192, prompts=16, conversations=12, together=4)
ARMS: dict[str, tuple[dict[str, str], str]] = {
    "plain vLLM": ({"KVPATCH": "0"}, ""),
    "vLLM + offloading": ({"KVPATCH": "0"}, "offloading"),
    "vLLM + simple eager": ({"KVPATCH": "0"}, "simple eager"),
    "vLLM + simple lazy": ({"KVPATCH": "0"}, "simple lazy"),
    "kvcached alone": (
        {"KVPATCH": "0", "ENABLE_KVCACHED": "1", "KVCACHED_AUTOPATCH": "1"},
        "",
    ),
    "kvcached + kvpatch": ({"KVPATCH": "1"}, "offloading"),
    "kvcached + kvpatch, again": ({"KVPATCH": "1"}, "offloading"),
    "kvcached + kvpatch, simple eager": ({"KVPATCH": "1"}, "simple eager"),
    "kvcached + kvpatch, simple lazy": ({"KVPATCH": "1"}, "simple lazy"),
}


def connector(name: str) -> dict[str, Any] | None:
    """Return vLLM's own configuration of a connector."""
    if not name:
        return None
    extra: dict[str, Any] = {"cpu_bytes_to_use": SIZE.tier_blocks * 8 * BLOCK_TOKENS * 4 * 64 * 4}
    if name == "offloading":
        kind = "OffloadingConnector"
    else:
        kind, extra = "SimpleCPUOffloadConnector", extra | {"lazy_offload": name == "simple lazy"}
    return {"kv_connector": kind, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def tokens(hashes: tuple[int, ...]) -> list[int]:
    """Return a prompt's tokens: those of a block follow from its hash."""
    made: list[int] = []
    for number in hashes:
        source = random.Random(number)
        made += [source.randrange(2, 258) for _ in range(BLOCK_TOKENS)]
    return made


def engine(job: dict[str, Any]) -> dict[str, Any]:
    """Run every load of one repeat on one engine, in this process."""
    if os.environ.get("KVPATCH") == "1":
        import kvpatch  # noqa: F401  before vllm
    from vllm import LLM, SamplingParams

    from harness.bench.loads import conversations, no_reuse

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
        kv_transfer_config=connector(job["connector"]),
    )
    found: dict[str, Any] = {"start_seconds": round(time.monotonic() - begun, 1)}
    for load in (no_reuse(SIZE, 1000), no_reuse(SIZE, job["repeat"]), conversations(SIZE, 0)):
        prompts = [{"prompt_token_ids": tokens(prompt.hashes)} for prompt in load.prompts]
        sampling = SamplingParams(temperature=0, max_tokens=SIZE.answer, ignore_eos=True)
        begun = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        total = sum(prompt.tokens + prompt.answer for prompt in load.prompts)
        # The first pass of the load without reuse warms up, and is overwritten by the second.
        found[load.name] = {
            "total_tokens_per_second": round(total / seconds, 1),
            "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        }
    return found


def child(job: dict[str, Any], environment: dict[str, str], folder: Path) -> dict[str, Any]:
    """Run one engine; what it said last when it failed."""
    (folder / "job.json").write_text(json.dumps(job))
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "KVPATCH" and not name.startswith(("KVCACHED", "ENABLE_KVCACHED"))
    }
    done = subprocess.run(
        [sys.executable, __file__, "--engine", str(folder)],
        env=kept | environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode or not result.exists():
        return {"failed": done.stdout.strip().splitlines()[-3:]}
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def main() -> int:
    """Run all arms and save after each engine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.engine:
        found = engine(json.loads((chosen.engine / "job.json").read_text()))
        (chosen.engine / "result.json").write_text(json.dumps(found))
        return 0
    from harness import provenance
    from harness.bench.one_model import turns
    from tiny_model import make_model

    result = provenance.header("scripts/gpu/run arms", SCRIPTS.parent, "one NVIDIA GPU")
    result |= {"size": SIZE.plain(), "runs": {name: [] for name in ARMS}}
    with tempfile.TemporaryDirectory(prefix="kvpatch-gpu-") as name:
        folder = Path(name)
        model = str(make_model(folder / "model", layers=8))
        for repeat in range(chosen.repeats):
            for arm in turns(list(ARMS), repeat):
                environment, offload = ARMS[arm]
                job = {"model": model, "connector": offload, "repeat": repeat}
                found = child(job, environment, folder)
                result["runs"][arm].append(found)
                print(f"repeat {repeat + 1}, {arm}: {json.dumps(found)}", flush=True)
                chosen.output.write_text(json.dumps(result, indent=1) + "\n")
    failed = [arm for arm, runs in result["runs"].items() if any("failed" in run for run in runs)]
    if failed:
        print(f"these arms failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
