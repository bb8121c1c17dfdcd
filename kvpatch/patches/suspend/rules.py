"""Configurations that cannot give their memory back by themselves."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from kvpatch import admitted
from kvpatch.environ import HOST_POOL, IDLE
from kvpatch.patches.host_pool import presence
from kvpatch.patches.offloading import place, together
from kvpatch.rules import Rule
from kvpatch.upstream import connectors
from kvpatch.versions import Facts

NAME = "idle"  # in the table of what ran


def _asked(facts: Facts) -> bool:
    return bool(IDLE.read(facts.environment))


def _elsewhere(config: Any, facts: Facts) -> bool:
    if _without_tier(config, facts):  # which is another reason, where anything ran
        return _asked(facts) and not admitted.ran_with(NAME, facts.vllm, [place.OFFLOADING])
    return _asked(facts) and not place.ran_with(NAME, config, facts)


def _without_tier(config: Any, facts: Facts) -> bool:
    leaves = connectors.leaves(config.kv_transfer_config)
    known = [leaf for leaf in leaves if leaf.name in (connectors.OFFLOADING, connectors.SIMPLE)]
    alone = len(leaves) == len(known) == 1
    inside = config.kv_transfer_config is not None and (
        config.kv_transfer_config.kv_connector == connectors.MULTI
    )
    return _asked(facts) and (not alone or inside)


# Settings that are suspensions themselves, and engines of one server, each of which is suspended
# alone.
_OWN = ("idle", "sleep", "2 engines")


def why_not(config: Any, facts: Facts | None, lifted: Container[str] = ()) -> str:
    """Return why an engine cannot be suspended, as the end of a sentence; empty if it can.

    ``lifted`` are codes of rules that are not asked; with KVP370 it need not have run.
    """
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return "it has no KV connector, so that its KV cache would be lost"
    if transfer.kv_connector not in (connectors.OFFLOADING, connectors.SIMPLE):
        return f"suspending is not validated with {transfer.kv_connector}"
    if facts is not None and _simple_in_a_pool(config, facts):
        return (
            f"the CPU tier of {connectors.SIMPLE} is in the host pool ({HOST_POOL}), where others "
            "may evict what it kept"
        )
    return "" if "KVP370" in lifted else _why_it_did_not_run(config, facts)


def _simple_in_a_pool(config: Any, facts: Facts) -> bool:
    """Return whether others may evict what was stored: with OffloadingConnector it is kept."""
    leaves = connectors.leaves(config.kv_transfer_config)
    simple = any(leaf.name == connectors.SIMPLE for leaf in leaves)
    return simple and presence.size(facts.environment) > 0


def _why_it_did_not_run(config: Any, facts: Facts | None) -> str:
    """Return why no engine of this kind was suspended with what this one has turned on."""
    if facts is None or not place.ran_with(NAME, config, facts):
        return f"suspending is validated {admitted.with_connectors(NAME)} only"
    for beside in together.turned_on(config, facts):
        both = admitted.together(NAME, beside)
        if beside not in _OWN and not place.ran_with(both, config, facts):
            return f"suspending is not validated with {together.SETTINGS[beside].words}"
    return ""


RULES = (
    Rule(
        "KVP370",
        f"`{IDLE}`" + admitted.but(NAME),
        _elsewhere,
        f"{IDLE} is set on this release, with this connector and this kind of model",
        f"giving memory back is validated {admitted.with_connectors(NAME)} only",
        f"unset {IDLE}, or use one of these",
        with_connector=False,
    ),
    Rule(
        "KVP372",
        f"`{IDLE}` with `{HOST_POOL}` and SimpleCPUOffloadConnector",
        lambda config, facts: _asked(facts) and _simple_in_a_pool(config, facts),
        f"{IDLE} and {HOST_POOL} are set with SimpleCPUOffloadConnector",
        "giving memory back is not validated there: other engines may evict what was stored",
        f"unset {IDLE} or {HOST_POOL}",
    ),
    Rule(
        "KVP371",
        f"`{IDLE}` without a connector, or with MultiConnector",
        _without_tier,
        f"{IDLE} is set",
        "giving memory back is validated with OffloadingConnector and SimpleCPUOffloadConnector by "
        "themselves only",
        f"unset {IDLE}, or configure one of the two",
        with_connector=False,
    ),
)
