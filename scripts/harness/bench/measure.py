"""One load on one server, and all its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.bench.client import serve
from harness.bench.loads import Load
from harness.bench.memory import MappedMemory, cpu_seconds, settled
from harness.bench.pairing import summary
from harness.serve import Server

TOKENS = {
    "computed": "local_compute",
    "from_cache": "local_cache_hit",
    "from_tier": "external_kv_transfer",
}
BYTES = {
    "stored": "vllm:kv_offload_store_bytes_total",
    "loaded": "vllm:kv_offload_load_bytes_total",
}
SECONDS = {
    "stored": "vllm:kv_offload_store_time_total",
    "loaded": "vllm:kv_offload_load_time_total",
}


def read(server: Server) -> dict[str, float]:
    """Return a server's own counters, once its last copies are counted."""

    def counters() -> dict[str, float]:
        total = server.metrics().total
        return {
            **{
                name: total("vllm:prompt_tokens_by_source_total", source=source)
                for name, source in TOKENS.items()
            },
            # vLLM counts for OffloadingConnector, kvpatch for both.
            **{
                name: max(total(series), total("vllm:kvpatch_offload_bytes_total", outcome=name))
                for name, series in BYTES.items()
            },
            **{f"{name} seconds": total(series) for name, series in SECONDS.items()},
            "preemptions": total("vllm:num_preemptions_total"),
        }

    return settled(counters)


def copies(server: Server) -> dict[str, int]:
    """Return what the worker's ``CopyCounter`` has counted so far."""
    if not server.offloads:
        return {"transfers": 0, "blocks": 0, "copies": 0}
    return dict(server.rpc("copies")[0])


def run(load: Load, server: Server, folder: Path, memory: MappedMemory) -> dict[str, Any]:
    """Send a load and return its figures.

    Raises:
        HarnessError: a request failed.
    """
    before, copied, used = read(server), copies(server), cpu_seconds(server)
    sampled = len(memory.samples)
    found = serve(load, server, folder)
    used = cpu_seconds(server) - used
    mapped = [sum(sample.values()) for _, sample in memory.samples[sampled:]]
    after = read(server)

    def since(name: str) -> float:
        return after[name] - before[name]

    def ttft(returning: bool) -> dict[str, float] | None:
        times = [
            time
            for time, prompt in zip(found["ttfts"], load.prompts, strict=True)
            if prompt.returning is returning
        ]
        return summary(times, 1000) if times else None

    now = copies(server)
    return {
        "seconds": round(found["duration"], 4),
        "requests_per_second": round(found["request_throughput"], 4),
        "total_tokens_per_second": round(found["total_token_throughput"], 2),
        "output_tokens_per_second": round(found["output_throughput"], 2),
        "ttft_ms": summary(found["ttfts"], 1000),
        "first_ttft_ms": ttft(returning=False),
        "returning_ttft_ms": ttft(returning=True),
        "tpot_ms": {n: round(found[f"{n}_tpot_ms"], 3) for n in ("mean", "p50", "p99")},
        "prompt_tokens": {name: int(since(name)) for name in TOKENS},
        "bytes": {name: int(since(name)) for name in BYTES},
        "copy_seconds": {name: round(since(f"{name} seconds"), 4) for name in SECONDS},
        "copies": {name: now[name] - copied[name] for name in now},
        "preemptions": int(since("preemptions")),
        "cpu_seconds": round(used, 2),
        "mapped_bytes": {"peak": max(mapped, default=0), "end": sum(memory.look().values())},
    }
