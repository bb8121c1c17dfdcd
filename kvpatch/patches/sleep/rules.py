"""Configurations in which vLLM may take memory from an engine that has a KV connector."""

from __future__ import annotations

from typing import Any

from kvpatch.environ import HOST_POOL
from kvpatch.patches.host_pool import presence
from kvpatch.rules import Rule
from kvpatch.upstream import connectors
from kvpatch.versions import Facts, in_words

# On which tests/long/test_sleep.py ran, or that of tests/versions/test_suspend_on_releases.py.
RELEASES = ("0.32.0", "0.33.0")
_KNOWN = (connectors.OFFLOADING, connectors.SIMPLE)
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def _sleep(config: Any) -> bool:
    return bool(getattr(config.model_config, "enable_sleep_mode", False))


def _settings(config: Any) -> list[str]:
    """Return the settings with which vLLM can take memory from a running engine.

    Sleep mode implies the allocator on CUDA, which vLLM 0.16 to 0.19 have without a setting of
    its own.
    """
    names = {"enable_sleep_mode": "sleep mode", "enable_cumem_allocator": "the cumem allocator"}
    return [said for name, said in names.items() if getattr(config.model_config, name, False)]


def _on_a_gpu(config: Any, facts: Facts) -> bool:
    return facts.device != "cpu" and bool(_settings(config))


def _untested(config: Any, facts: Facts) -> bool:
    if facts.device != "cpu" or not _sleep(config):
        return False
    leaves = connectors.leaves(config.kv_transfer_config)
    alone = len(leaves) == 1 and leaves[0].name in _KNOWN and not leaves[0].tiers
    inside = config.kv_transfer_config.kv_connector == connectors.MULTI
    several = any(getattr(config.parallel_config, size, 1) > 1 for size in _SIZES)
    return (
        not facts.vllm.is_one_of(list(RELEASES))
        or not alone
        or inside
        or several
        or presence.size(facts.environment) > 0
    )


RULES = (
    Rule(
        "KVP341",
        "offloading with sleep mode, or with vLLM's cumem allocator, on a GPU",
        _on_a_gpu,
        lambda config, facts: f"a KV connector is configured with {_settings(config)[0]}",
        "kvcached's memory is not in the pool that vLLM empties and restores, and the blocks of "
        "the CPU tier are not validated after a wake-up, which may bring other weights",
        "remove --enable-sleep-mode and --enable-cumem-allocator, or run it without a KV connector",
    ),
    Rule(
        "KVP375",
        f"offloading with sleep mode on the host device, except on vLLM {in_words(list(RELEASES))} "
        "with OffloadingConnector or SimpleCPUOffloadConnector, one rank, no secondary tiers and "
        f"no `{HOST_POOL}`",
        _untested,
        "a KV connector is configured with sleep mode",
        "keeping the CPU tier in a sleep is validated with one connector's CPU tier of an engine "
        "with one rank",
        "remove --enable-sleep-mode, or configure what is validated",
    ),
)
