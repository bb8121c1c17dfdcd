"""Configurations of secondary tiers that are refused."""

from __future__ import annotations

from typing import Any

from kvpatch.environ import TIER_SIZE
from kvpatch.patches.offloading.connector_rules import has_tiers
from kvpatch.rules import Rule
from kvpatch.supported import in_ranges, validated
from kvpatch.upstream import connectors
from kvpatch.versions import Facts, Span

TIERS = Span("0.24")
# By type, the releases on which engines ran with it; None for all that have tiers.
VALIDATED_TIERS: dict[str, tuple[str, ...] | None] = {"fs": None, "obj": ("0.32.0",)}
INCOMPATIBLE_TIERS = ("example", "p2p")  # each with a rule of its own


def _types(config: Any) -> list[str]:
    leaves = connectors.leaves(config.kv_transfer_config)
    return [str(tier.get("type")) for leaf in leaves for tier in leaf.tiers]


def _others(config: Any, facts: Facts) -> list[str]:
    def runs(tier: str) -> bool:
        on = VALIDATED_TIERS.get(tier, ())
        return on is None or facts.vllm.is_one_of(on)

    return [tier for tier in _types(config) if tier not in INCOMPATIBLE_TIERS and not runs(tier)]


def in_words() -> str:
    """Return the types of secondary tiers that are validated, and where."""
    return " or ".join(
        tier if on is None else f"{tier} on vLLM {in_ranges(on)}"
        for tier, on in VALIDATED_TIERS.items()
    )


def _hashes(config: Any) -> str:
    return str(getattr(config.cache_config, "prefix_caching_hash_algo", "sha256"))


def _any(config: Any, facts: Facts) -> bool:
    return has_tiers(config)


RULES = (
    Rule(
        "KVP329",
        "secondary tiers before vLLM 0.24",
        _any,
        "a secondary tier is configured",
        "the tiers of this release keep their blocks when the prefix cache is reset "
        "(vllm-project/vllm#44541) and access a disk on the scheduler's thread "
        "(vllm-project/vllm#44193)",
        "use OffloadingConnector without secondary tiers, or install vLLM 0.24",
        only_in=Span("0", "0.24"),
    ),
    Rule(
        "KVP330",
        f"secondary tiers, except on vLLM {in_ranges(validated(TIERS))}",
        _any,
        "a secondary tier is configured on this release",
        f"it is validated on vLLM {in_ranges(validated(TIERS))} only",
        "use OffloadingConnector without secondary tiers, or one of these releases",
        only_in=TIERS,
        unless_validated=TIERS,
    ),
    Rule(
        "KVP321",
        "the `example` tier",
        lambda config, facts: "example" in _types(config),
        "the secondary tier example is configured",
        "vLLM's example keeps the keys of blocks and not their bytes, so that a load returns "
        "whatever the CPU tier has in that place",
        "use the tier fs",
    ),
    Rule(
        "KVP364",
        "the `p2p` tier",
        lambda config, facts: "p2p" in _types(config),
        "the secondary tier p2p is configured",
        "vLLM gives the memory of a load to other blocks when the peer has not answered for 40 s, "
        "and a peer that goes on later writes into them",
        f"use the tier {in_words()}",
    ),
    Rule(
        "KVP322",
        "secondary tiers other than the ones above",
        lambda config, facts: bool(_others(config, facts)),
        lambda config, facts: f"the secondary tier {_others(config, facts)[0]} is configured",
        "it is not validated on this release",
        f"use the tier {in_words()}",
    ),
    Rule(
        "KVP323",
        "secondary tiers with the scheduling policy `priority`",
        lambda config, facts: has_tiers(config) and config.scheduler_config.policy == "priority",
        "a secondary tier is configured with the scheduling policy priority",
        "a request that waits for the tier can then block those that hold the memory it needs",
        "use the scheduling policy fcfs",
    ),
    Rule(
        "KVP333",
        "secondary tiers with a prefix caching hash other than `sha256` and `sha256_cbor`",
        lambda config, facts: has_tiers(config) and not _hashes(config).startswith("sha256"),
        lambda config, facts: (
            f"a secondary tier is configured with prefix_caching_hash_algo {_hashes(config)}"
        ),
        "that hash is not collision resistant, and a block that is stored under another's hash "
        "would be served to every later engine",
        "use --prefix-caching-hash-algo sha256",
    ),
    Rule(
        "KVP386",
        "`KVPATCH_TIER_SIZE` with a secondary tier other than `fs`",
        lambda config, facts: (
            bool(TIER_SIZE.read(facts.environment)) and not {*_types(config)} <= {"fs"}
        ),
        f"{TIER_SIZE} is set with a secondary tier that is no folder",
        "it is validated with the tier fs alone, and another one would grow without a limit",
        f"unset {TIER_SIZE}, or use the tier fs",
    ),
)
