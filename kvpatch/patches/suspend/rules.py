"""Configurations that cannot give their memory back by themselves."""

from __future__ import annotations

from typing import Any

from kvpatch import admitted
from kvpatch.environ import HOST_POOL, IDLE
from kvpatch.patches.host_pool import presence
from kvpatch.patches.offloading import place
from kvpatch.patches.suspend.releases import NAME
from kvpatch.rules import Rule
from kvpatch.upstream import connectors
from kvpatch.versions import Facts


def _asked(facts: Facts) -> bool:
    return bool(IDLE.read(facts.environment))


def _elsewhere(config: Any, facts: Facts) -> bool:
    ways = place.ways(config.kv_transfer_config)
    if _without_tier(config, facts):  # which is another reason, where anything ran
        ways = [place.OFFLOADING]
    return _asked(facts) and not admitted.ran_with(NAME, facts.vllm, ways)


def _without_tier(config: Any, facts: Facts) -> bool:
    leaves = connectors.leaves(config.kv_transfer_config)
    known = [leaf for leaf in leaves if leaf.name in (connectors.OFFLOADING, connectors.SIMPLE)]
    alone = len(leaves) == len(known) == 1 and not known[0].tiers
    inside = config.kv_transfer_config is not None and (
        config.kv_transfer_config.kv_connector == connectors.MULTI
    )
    return _asked(facts) and (not alone or inside)


RULES = (
    Rule(
        "KVP370",
        f"`{IDLE}`" + admitted.but(NAME),
        _elsewhere,
        f"{IDLE} is set on this release",
        f"giving memory back is validated {admitted.with_connectors(NAME)} only",
        f"unset {IDLE}, or use one of these",
        with_connector=False,
    ),
    Rule(
        "KVP372",
        f"`{IDLE}` with `{HOST_POOL}`",
        lambda config, facts: _asked(facts) and presence.size(facts.environment) > 0,
        f"{IDLE} and {HOST_POOL} are set",
        "giving memory back is validated with a CPU tier of an engine's own only",
        f"unset {IDLE} or {HOST_POOL}",
        with_connector=False,
    ),
    Rule(
        "KVP371",
        f"`{IDLE}` without a CPU tier alone: no connector, secondary tiers, or MultiConnector",
        _without_tier,
        f"{IDLE} is set",
        "giving memory back is validated with the CPU tier of OffloadingConnector or "
        "SimpleCPUOffloadConnector alone",
        f"unset {IDLE}, or configure one of the two",
        with_connector=False,
    ),
)
