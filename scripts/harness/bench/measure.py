"""One load on one server, and everything that is known of it afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.bench.client import serve
from harness.bench.loads import Load
from harness.bench.memory import MappedMemory, cpu_seconds, settled
from harness.bench.pairing import summary
from harness.demo.meter import sums
from harness.serve import Server

TOKENS = {
    "computed": "local_compute",
    "from_cache": "local_cache_hit",
    "from_tier": "external_kv_transfer",
}
BYTES = {
    "stored": ("vllm:kv_offload_store_bytes_total", "vllm:kvpatch_offload_bytes_total stored"),
    "loaded": ("vllm:kv_offload_load_bytes_total", "vllm:kvpatch_offload_bytes_total loaded"),
}
SECONDS = {
    "stored": "vllm:kv_offload_store_time_total",
    "loaded": "vllm:kv_offload_load_time_total",
}
PREEMPTIONS = "vllm:num_preemptions_total"


def read(server: Server) -> dict[str, float]:
    """Return a server's own counters, once its last copies are counted."""
    return dict(settled(lambda: _moved(sums(server.client.get("/metrics").text))))


def _moved(found: dict[str, float]) -> dict[str, float]:
    """Only what a load moves: other series change by themselves."""
    wanted = {*TOKENS.values(), *SECONDS.values(), PREEMPTIONS}
    wanted |= {name for names in BYTES.values() for name in names}
    return {name: value for name, value in found.items() if name in wanted}


def call(server: Server, method: str) -> Any:
    """Call a method of the server's worker; a server of one worker is meant."""
    answer = server.client.post("/collective_rpc", json={"method": method})
    answer.raise_for_status()
    return answer.json()["results"][0]


def begin_counting(server: Server) -> None:
    """Let the worker count its copies, if it makes any."""
    if "kv-transfer-config" in server.kind.arguments:
        call(server, "count_copies")


def copies(server: Server) -> dict[str, int]:
    """Return what the worker has counted so far."""
    if "kv-transfer-config" not in server.kind.arguments:
        return {"transfers": 0, "blocks": 0, "copies": 0}
    return dict(call(server, "copies"))


def run(load: Load, server: Server, folder: Path, memory: MappedMemory) -> dict[str, Any]:
    """Send a load and return its figures.

    Raises:
        HarnessError: a request failed.
    """
    before, copied, used = read(server), copies(server), cpu_seconds(server)
    looked = len(memory.samples)
    found = serve(load, server, folder)
    used = cpu_seconds(server) - used
    mapped = [sum(sample.values()) for _, sample in memory.samples[looked:]]
    after = read(server)

    def since(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    returning = [
        ttft for ttft, prompt in zip(found["ttfts"], load.prompts, strict=True) if prompt.returning
    ]
    first = [
        ttft
        for ttft, prompt in zip(found["ttfts"], load.prompts, strict=True)
        if not prompt.returning
    ]
    now = copies(server)
    return {
        "seconds": round(found["duration"], 4),
        "requests_per_second": round(found["request_throughput"], 4),
        "total_tokens_per_second": round(found["total_token_throughput"], 2),
        "output_tokens_per_second": round(found["output_throughput"], 2),
        "ttft_ms": summary(found["ttfts"], 1000),
        "first_ttft_ms": summary(first, 1000) if first else None,
        "returning_ttft_ms": summary(returning, 1000) if returning else None,
        "tpot_ms": {
            "mean": round(found["mean_tpot_ms"], 3),
            "p50": round(found["p50_tpot_ms"], 3),
            "p99": round(found["p99_tpot_ms"], 3),
        },
        "prompt_tokens": {name: int(since(series)) for name, series in TOKENS.items()},
        # vLLM counts for OffloadingConnector, kvpatch for both.
        "bytes": {name: int(max(since(series) for series in both)) for name, both in BYTES.items()},
        "copy_seconds": {name: round(since(series), 4) for name, series in SECONDS.items()},
        "copies": {name: now[name] - copied[name] for name in now},
        "preemptions": int(since(PREEMPTIONS)),
        "cpu_seconds": round(used, 2),
        "mapped_bytes": {"peak": max(mapped, default=0), "end": sum(memory.look().values())},
    }
