"""Configurations that are not validated on the host device, and are refused otherwise on a GPU."""

from __future__ import annotations

from typing import Any

from kvpatch.environ import HOST_POOL
from kvpatch.rules import Rule
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


RULES = (
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
