"""Connectors, specs and keys of theirs that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpatch import admitted, distributions
from kvpatch.patches.offloading import place
from kvpatch.rules import Rule
from kvpatch.supported import in_ranges, validated
from kvpatch.upstream import connector_keys, connectors
from kvpatch.versions import Facts, Span, in_words

VALIDATED_CONNECTORS = (connectors.OFFLOADING, connectors.SIMPLE)
# Connectors that may be inside a MultiConnector, each of them once.
VALIDATED_INSIDE = VALIDATED_CONNECTORS
# (spec_name, spec_module_path) pairs.
VALIDATED_SPECS = (
    ("CPUOffloadingSpec", None),
    ("TieringOffloadingSpec", None),
    *distributions.specs(),
)
MULTI = Span("0.16")
# Keys of kv_connector_extra_config that no engine ran with, and what is in the table of what ran.
OTHER_KEYS = ("backpressure", "cache_policy_module_path")
SELF_DESCRIBING = "self-describing events"
# Register a KV cache once, at the start, for transfers that its engine does not begin.
REGISTERING = (
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
    *("MooncakeConnector", "MooncakeStoreConnector", "MoRIIOConnector"),
)
ROUND_TRIP = "it has not been validated by a store and load round trip"


def leaves(config: Any) -> list[connectors.Leaf]:
    """Return the connectors of a configuration, including those inside a MultiConnector."""
    return connectors.leaves(config.kv_transfer_config)


def in_multi(config: Any) -> bool:
    """Return whether the connectors are inside vLLM's MultiConnector."""
    transfer = config.kv_transfer_config
    return transfer.kv_connector == connectors.MULTI and transfer.kv_connector_module_path is None


def has_tiers(config: Any) -> bool:
    """Return whether there are secondary tiers."""
    return any(leaf.tiers for leaf in leaves(config))


def _other_connector(config: Any, facts: Facts) -> bool:
    transfer = config.kv_transfer_config
    return (
        not in_multi(config)
        and (
            transfer.kv_connector not in VALIDATED_CONNECTORS
            or transfer.kv_connector_module_path is not None
        )
        and not _registering(config)
    )


def _others_inside(config: Any) -> list[str]:
    return [
        leaf.name
        for leaf in leaves(config)
        if in_multi(config)
        and (leaf.name not in VALIDATED_INSIDE or leaf.module is not None)
        and leaf.name not in _registering(config)
    ]


def _registering(config: Any) -> list[str]:
    return [one.name for one in leaves(config) if one.name in REGISTERING and one.module is None]


def _twice_inside(config: Any) -> list[str]:
    names = [leaf.name for leaf in leaves(config)]
    return [name for name in VALIDATED_INSIDE if names.count(name) > 1]


def _other_specs(config: Any) -> list[str]:
    found = []
    for leaf in leaves(config):
        if leaf.name == connectors.SIMPLE:  # has no specs and ignores the key
            continue
        name = leaf.spec
        own = name in ("CPUOffloadingSpec", "TieringOffloadingSpec")  # vLLM's, for any path
        if (name, None if own else leaf.extra.get("spec_module_path")) not in VALIDATED_SPECS:
            found.append(name)
    return found


def _other_keys(config: Any, facts: Facts) -> list[str]:
    keys = [key for leaf in leaves(config) for key in OTHER_KEYS if leaf.extra.get(key)]
    if not place.ran_with(SELF_DESCRIBING, config, facts):
        keys += ["self_describing_kv_events"] * _describes_events(config)
    return keys


def _describes_events(config: Any) -> bool:
    return any(leaf.extra.get("self_describing_kv_events") for leaf in leaves(config))


def _unread_keys(config: Any, facts: Facts) -> str:
    """Return what to say of keys that vLLM ignores: an operator may count on their effect."""
    found = [(leaf, key, hint) for leaf in leaves(config) for key, hint in _unread(leaf)]
    return ", and ".join(
        f"vLLM {facts.vllm.public} ignores {key} of {leaf.name}'s kv_connector_extra_config: {hint}"
        for leaf, key, hint in found
    )


def _unread(leaf: connectors.Leaf) -> Iterator[tuple[str, str]]:
    for key, near in connector_keys.unread(leaf).items():
        if key != "secondary_tiers":
            yield key, f"did you mean {near}?" if near else "remove it"
        elif leaf.name == connectors.SIMPLE:
            yield key, f"only {connectors.OFFLOADING} has secondary tiers"
        else:
            yield key, "it takes spec_name TieringOffloadingSpec beside it"


RULES = (
    Rule(
        "KVP365",
        "`secondary_tiers`, or `connectors` of a MultiConnector, that are not a list of objects",
        lambda config, facts: bool(connectors.no_list(config.kv_transfer_config)),
        lambda config, facts: (
            f"{connectors.no_list(config.kv_transfer_config)} is not a list of objects"
        ),
        "vLLM reads the configuration of one tier, or of one connector, from each of them",
        "write a list, also of a single one, as in [{...}]",
        warns=_unread_keys,
    ),
    Rule(
        "KVP391",
        in_words([f"`{one}`" for one in REGISTERING]) + ", alone or inside a MultiConnector",
        lambda config, facts: bool(_registering(config)),
        lambda config, facts: f"the KV connector {_registering(config)[0]} is configured",
        "it registers the KV cache's addresses once, and kvcached maps and unmaps pages there "
        "while the engine runs: a registration that holds pages is stale, and a peer that reads "
        "an unmapped one gets other bytes and no error",
        "use OffloadingConnector or SimpleCPUOffloadConnector without it",
    ),
    Rule(
        "KVP302",
        "connectors other than vLLM's own OffloadingConnector and SimpleCPUOffloadConnector",
        _other_connector,
        lambda config, facts: (
            f"the KV connector {config.kv_transfer_config.kv_connector} is configured"
        ),
        "only vLLM's own OffloadingConnector and SimpleCPUOffloadConnector are validated on "
        "kvcached's memory",
        "use one of these",
    ),
    Rule(
        "KVP328",
        f"MultiConnector, except on vLLM {in_ranges(validated(MULTI))}",
        lambda config, facts: in_multi(config),
        "MultiConnector is configured on this release",
        f"it is validated on vLLM {in_ranges(validated(MULTI))} only",
        "use one connector, or one of these releases",
        unless_validated=MULTI,
    ),
    Rule(
        "KVP362",
        "SimpleCPUOffloadConnector inside MultiConnector before vLLM 0.22",
        lambda config, facts: (
            in_multi(config) and any(leaf.name == connectors.SIMPLE for leaf in leaves(config))
        ),
        "SimpleCPUOffloadConnector is configured inside MultiConnector",
        "MultiConnector of this release does not give it the device's blocks: it stores nothing",
        "use one connector, or install vLLM 0.22",
        only_in=Span("0", "0.22"),
    ),
    Rule(
        "KVP319",
        "a MultiConnector with connectors other than the ones above",
        lambda config, facts: bool(_others_inside(config)),
        lambda config, facts: (
            f"a MultiConnector is configured with {_others_inside(config)[0]} inside"
        ),
        "that connector's copies are not validated on kvcached's memory",
        f"leave only {' and '.join(VALIDATED_INSIDE)} in it",
    ),
    Rule(
        "KVP320",
        "a MultiConnector with one connector twice",
        lambda config, facts: bool(_twice_inside(config)),
        lambda config, facts: (
            f"a MultiConnector is configured with {_twice_inside(config)[0]} twice"
        ),
        "vLLM would give both the same shared memory",
        "leave one of them",
    ),
    Rule(
        "KVP303",
        "offloading specs other than the ones above",
        lambda config, facts: bool(_other_specs(config)),
        lambda config, facts: f"the offloading spec {_other_specs(config)[0]} is configured",
        ROUND_TRIP,
        "remove spec_name from kv_connector_extra_config",
    ),
    Rule(
        "KVP304",
        "`canonical_layout`",
        lambda config, facts: any(leaf.extra.get("canonical_layout") for leaf in leaves(config)),
        "canonical_layout is set in kv_connector_extra_config",
        "vLLM cannot certify that layout on kvcached's memory",
        "remove canonical_layout",
    ),
    Rule(
        "KVP354",
        "`eviction_policy: arc`, before vLLM 0.17",
        lambda config, facts: any(
            leaf.extra.get("eviction_policy") == "arc"
            for leaf in connectors.offloading(config.kv_transfer_config)
        ),
        "eviction_policy arc is set in kv_connector_extra_config",
        "it fails at the first store, and the engine ends with it",
        "remove eviction_policy, or install vLLM 0.17 or later",
        only_in=Span("0", "0.17"),
    ),
    Rule(
        "KVP351",
        "`sync_load_budget_bytes`, from vLLM 0.33 on",
        lambda config, facts: any(
            leaf.name == connectors.OFFLOADING and leaf.extra.get("sync_load_budget_bytes")
            for leaf in leaves(config)
        ),
        "sync_load_budget_bytes is set in kv_connector_extra_config",
        "loads within a step, of requests that already run, have not been validated on kvcached's "
        "memory",
        "remove sync_load_budget_bytes",
        only_in=Span("0.33"),
    ),
    Rule(
        "KVP377",
        "`cache_policy_module_path` and `backpressure` in kv_connector_extra_config; "
        "`self_describing_kv_events`" + admitted.but(SELF_DESCRIBING),
        lambda config, facts: bool(_other_keys(config, facts)),
        lambda config, facts: (
            f"{_other_keys(config, facts)[0]} is set in kv_connector_extra_config"
        ),
        "with that key the connector is not validated on this release",
        "remove it",
    ),
)
