"""Settings that start together only where an engine ran with both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

from kvpatch import admitted
from kvpatch.environ import FIRST_LIMIT, HOST_POOL, IDLE
from kvpatch.patches.offloading import dtype_rules, model_rules, place, rules
from kvpatch.rules import Rule
from kvpatch.upstream import connectors
from kvpatch.versions import Facts


def _is_set(variable: Any) -> Callable[[Any, Facts], bool]:
    return lambda config, facts: bool(variable.read(facts.environment))


def _has_stages(config: Any) -> bool:
    return bool(getattr(config.parallel_config, "pipeline_parallel_size", 1) > 1)


def _drafts(method: str) -> Callable[[Any, Facts], bool]:
    def drafts(config: Any, facts: Facts) -> bool:
        return bool(getattr(config.speculative_config, "method", "") == method)

    return drafts


class Setting(NamedTuple):
    """What an operator may turn on: whether a configuration has it, and its words in a sentence."""

    has: Callable[[Any, Facts], bool]
    words: str


# By the names of the matrix.
SETTINGS = {
    "fp8": Setting(dtype_rules.is_fp8, "an fp8 KV cache"),
    "several ranks": Setting(
        lambda config, facts: (
            config.parallel_config.world_size > 1
            and not _has_stages(config)
            and not model_rules.spreads_experts(config)
        ),
        "tensor parallelism",
    ),
    "expert parallelism": Setting(
        lambda config, facts: model_rules.spreads_experts(config), "expert parallelism"
    ),
    "2 stages": Setting(lambda config, facts: _has_stages(config), "pipeline parallelism"),
    "2 engines": Setting(
        lambda config, facts: getattr(config.parallel_config, "data_parallel_size", 1) > 1,
        "data parallelism",
    ),
    **{
        name: Setting(_drafts(method), f"speculative decoding by {method}")
        for method, name in rules.DRAFTING.items()
    },
    "whole prompts": Setting(rules.has_whole_prompts, "chunked prefill disabled"),
    "no hybrid manager": Setting(
        rules.has_no_hybrid_manager, "the hybrid KV cache manager disabled"
    ),
    "store threshold": Setting(rules.has_threshold, "store_threshold"),
    "chunks": Setting(rules.has_chunks, "chunks of several blocks"),
    "no prefix cache": Setting(
        lambda config, facts: not config.cache_config.enable_prefix_caching,
        "the prefix cache disabled",
    ),
    "KV events": Setting(
        lambda config, facts: (
            getattr(config.kv_events_config, "enable_kv_cache_events", False) is True
        ),
        "KV cache events",
    ),
    "pooling": Setting(
        lambda config, facts: getattr(config.model_config, "runner_type", "") == "pooling",
        "a pooling model",
    ),
    "sleep": Setting(
        lambda config, facts: getattr(config.model_config, "enable_sleep_mode", False) is True,
        "sleep mode",
    ),
    "arc": Setting(
        lambda config, facts: any(
            leaf.extra.get("eviction_policy") == "arc"
            for leaf in connectors.offloading(config.kv_transfer_config)
        ),
        "the eviction policy arc",
    ),
    "object tier": Setting(
        lambda config, facts: any(
            tier.get("type") == "obj"
            for leaf in connectors.leaves(config.kv_transfer_config)
            for tier in leaf.tiers
        ),
        "the tier obj",
    ),
    model_rules.DELTA: Setting(
        lambda config, facts: place.has_delta_nets(config.model_config), "gated delta nets"
    ),
    "host pool": Setting(_is_set(HOST_POOL), HOST_POOL.name),
    "idle": Setting(_is_set(IDLE), IDLE.name),
    "first limit": Setting(_is_set(FIRST_LIMIT), FIRST_LIMIT.name),
}


# Settings that no rule asks for alone, and the kinds of model that ask for a run with each.
_ANYWHERE = ("KV events", "arc")
_KINDS = {
    place.LATENT: "latent attention",
    place.SPARSE: "sparse attention",
    place.HYBRID: "a hybrid model",
}


def turned_on(config: Any, facts: Facts) -> list[str]:
    """Return the names of the settings that a configuration has."""
    return [name for name, one in SETTINGS.items() if one.has(config, facts)]


def _apart(config: Any, facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield what no engine ran with together here, in words: settings, and one with a model."""
    found = turned_on(config, facts)
    for one, other in combinations(found, 2):
        if not place.ran_with(admitted.together(one, other), config, facts):
            yield SETTINGS[one].words, SETTINGS[other].words
    kind = _KINDS.get(place.kind_of(getattr(config, "model_config", None)))
    for one in found:
        if kind and one in _ANYWHERE and not place.ran_with(one, config, facts):
            yield SETTINGS[one].words, kind


def _what(config: Any, facts: Facts) -> str:
    return "{} and {} are configured together".format(*next(_apart(config, facts)))


RULES = (
    *rules.RULES,
    Rule(
        "KVP376",
        "two settings that start alone, on a release and connector, and with a kind of model, with "
        "which no engine ran with both: [the pairs that did](#pairs-of-settings)",
        lambda config, facts: next(_apart(config, facts), None) is not None,
        _what,
        "on this release, with this connector and kind of model each of them is validated, and "
        "both together are not",
        "turn one of them off, or take a release and connector that both ran with "
        "(docs/support.md, Pairs of settings)",
        last=True,
    ),
)
