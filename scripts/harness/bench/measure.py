"""One load on one server, and all its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.bench.client import serve
from harness.bench.loads import Load
from harness.bench.memory import settled
from harness.bench.pairing import summary
from harness.serve import Server

TOKENS = {
    "computed": "local_compute",
    "from_cache": "local_cache_hit",
    "from_tier": "external_kv_transfer",
}


def read(server: Server) -> dict[str, float]:
    """Return where the tokens of a server's prompts came from, once all are counted."""

    def counters() -> dict[str, float]:
        total = server.metrics().total
        return {
            name: total("vllm:prompt_tokens_by_source_total", source=source)
            for name, source in TOKENS.items()
        }

    return settled(counters)


def copies(server: Server) -> dict[str, int]:
    """Return what the worker's ``CopyCounter`` has counted so far."""
    if not server.has("worker-extension-cls"):
        return {"blocks": 0, "copies": 0}
    return dict(server.rpc("copies")[0])


def run(load: Load, server: Server, folder: Path) -> dict[str, Any]:
    """Send a load and return its figures.

    Raises:
        HarnessError: a request failed.
    """
    before, copied = read(server), copies(server)
    found = serve(load, server, folder)
    after, now = read(server), copies(server)
    return {
        "seconds": round(found["duration"], 4),
        "total_tokens_per_second": round(found["total_token_throughput"], 2),
        "ttft_ms": summary(found["ttfts"], 1000),
        "itl_ms": summary([one for each in found["itls"] for one in each], 1000),
        "prompt_tokens": {name: int(after[name] - before[name]) for name in TOKENS},
        "copies": {name: now[name] - copied[name] for name in now},
    }
