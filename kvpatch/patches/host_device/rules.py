"""Configurations that the host device has no room for, or that are refused otherwise on a GPU."""

from __future__ import annotations

from typing import Any

from kvpatch import environ
from kvpatch.environ import HOST_DEVICE, HOST_POOL
from kvpatch.rules import Rule
from kvpatch.sizes import readable
from kvpatch.upstream import connectors
from kvpatch.versions import Facts, in_words

# On which tests/long/test_sleep.py ran, or that of tests/versions/test_suspend_on_releases.py.
SLEEPING = ("0.32.0", "0.33.0")
_KNOWN = (connectors.OFFLOADING, connectors.SIMPLE)
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def _sleep(config: Any) -> bool:
    return bool(getattr(config.model_config, "enable_sleep_mode", False))


def _untested(config: Any, facts: Facts) -> bool:
    if facts.device != "cpu" or not _sleep(config):
        return False
    leaves = connectors.leaves(config.kv_transfer_config)
    alone = len(leaves) == 1 and leaves[0].name in _KNOWN and not leaves[0].tiers
    inside = config.kv_transfer_config.kv_connector == connectors.MULTI
    several = any(getattr(config.parallel_config, size, 1) > 1 for size in _SIZES)
    return (
        not facts.vllm.is_one_of(list(SLEEPING))
        or not alone
        or inside
        or several
        or bool(HOST_POOL.read(facts.environment))
    )


def _kv_cache(config: Any) -> int:
    """Return the bytes that a rank's KV cache is to have (VLLM_CPU_KVCACHE_SPACE); 0 if open."""
    cache = config.cache_config
    if getattr(cache, "num_gpu_blocks_override", None) is not None:
        return 0
    names = ("cpu_kvcache_space_bytes", "kv_cache_memory_bytes")
    return next((size for name in names if (size := getattr(cache, name, None))), 0)


def _device(facts: Facts) -> int:
    size = HOST_DEVICE.read(facts.environment)
    return environ.size(size) if facts.device == "cpu" and size else 0


RULES = (
    Rule(
        "KVP505",
        "a KV cache that is larger than the host device",
        lambda config, facts: 0 < _device(facts) < _kv_cache(config),
        lambda config, facts: (
            f"the KV cache is to have {readable(_kv_cache(config))}, and {HOST_DEVICE} is "
            f"{readable(_device(facts))}"
        ),
        "kvcached has addresses for the host device only",
        f"set a larger {HOST_DEVICE}, or a smaller VLLM_CPU_KVCACHE_SPACE or "
        "--kv-cache-memory-bytes",
        with_connector=False,
    ),
    Rule(
        "KVP375",
        f"offloading with sleep mode on the host device, except on vLLM {in_words(list(SLEEPING))} "
        "with OffloadingConnector or SimpleCPUOffloadConnector, one rank, no secondary tiers and "
        f"no `{HOST_POOL}`",
        _untested,
        "a KV connector is configured with sleep mode",
        "keeping the CPU tier in a sleep is validated with one connector's CPU tier of an engine "
        "with one rank",
        "remove --enable-sleep-mode, or configure what is validated",
    ),
)
