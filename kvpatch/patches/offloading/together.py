"""Settings that start together only where an engine ran with both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from kvpatch import admitted
from kvpatch.environ import FIRST_LIMIT, HOST_POOL, IDLE
from kvpatch.patches.offloading import place, rules
from kvpatch.rules import Rule
from kvpatch.upstream import connectors
from kvpatch.versions import Facts


def _extra(name: str) -> Callable[[Any, Facts], bool]:
    """Return whether OffloadingConnector has a key that is not its default."""
    return lambda config, facts: any(
        leaf.extra.get(name) not in (None, "lru")
        for leaf in connectors.offloading(config.kv_transfer_config)
    )


def _is_set(variable: Any) -> Callable[[Any, Facts], bool]:
    return lambda config, facts: bool(variable.read(facts.environment))


def _has_stages(config: Any) -> bool:
    return bool(getattr(config.parallel_config, "pipeline_parallel_size", 1) > 1)


def _drafts(method: str) -> Callable[[Any, Facts], bool]:
    def drafts(config: Any, facts: Facts) -> bool:
        return bool(getattr(config.speculative_config, "method", "") == method)

    return drafts


# By the names of the matrix: whether a configuration has it, and what it is in a sentence.
SETTINGS: dict[str, tuple[Callable[[Any, Facts], bool], str]] = {
    "fp8": (lambda config, facts: rules.is_fp8(config, facts), "an fp8 KV cache"),
    "several ranks": (
        lambda config, facts: config.parallel_config.world_size > 1 and not _has_stages(config),
        "tensor parallelism",
    ),
    "2 stages": (lambda config, facts: _has_stages(config), "pipeline parallelism"),
    "2 engines": (
        lambda config, facts: getattr(config.parallel_config, "data_parallel_size", 1) > 1,
        "data parallelism",
    ),
    **{
        name: (_drafts(method), f"speculative decoding by {method}")
        for method, name in rules.DRAFTING.items()
    },
    "whole prompts": (
        lambda config, facts: rules.has_whole_prompts(config),
        "chunked prefill disabled",
    ),
    "no hybrid manager": (
        lambda config, facts: rules.has_no_hybrid_manager(config, facts),
        "the hybrid KV cache manager disabled",
    ),
    "store threshold": (
        lambda config, facts: rules.has_threshold(config),
        "store_threshold",
    ),
    "chunks": (lambda config, facts: rules.has_chunks(config), "chunks of several blocks"),
    "no prefix cache": (
        lambda config, facts: not config.cache_config.enable_prefix_caching,
        "the prefix cache disabled",
    ),
    "KV events": (
        lambda config, facts: (
            getattr(config.kv_events_config, "enable_kv_cache_events", False) is True
        ),
        "KV cache events",
    ),
    "pooling": (
        lambda config, facts: getattr(config.model_config, "runner_type", "") == "pooling",
        "a pooling model",
    ),
    "sleep": (
        lambda config, facts: getattr(config.model_config, "enable_sleep_mode", False) is True,
        "sleep mode",
    ),
    "arc": (_extra("eviction_policy"), "the eviction policy arc"),
    "host pool": (_is_set(HOST_POOL), HOST_POOL.name),
    "idle": (_is_set(IDLE), IDLE.name),
    "first limit": (_is_set(FIRST_LIMIT), FIRST_LIMIT.name),
}


def turned_on(config: Any, facts: Facts) -> list[str]:
    """Return the names of the settings that a configuration has."""
    return [name for name, (has, _) in SETTINGS.items() if has(config, facts)]


def _apart(config: Any, facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the pairs of settings that no engine ran with on this release and connector."""
    ways = place.ways(config.kv_transfer_config)
    for one, other in combinations(turned_on(config, facts), 2):
        if not admitted.ran_with(admitted.together(one, other), facts.vllm, ways):
            yield one, other


def _what(config: Any, facts: Facts) -> str:
    one, other = next(_apart(config, facts))
    return f"{SETTINGS[one][1]} and {SETTINGS[other][1]} are configured together"


RULES = (
    *rules.RULES,
    Rule(
        "KVP376",
        "two settings that start alone, on a release and connector with which no engine ran with "
        "both: [the pairs that did](#pairs-of-settings)",
        lambda config, facts: next(_apart(config, facts), None) is not None,
        _what,
        "on this release and with this connector each of them is validated, and both together are "
        "not",
        "turn one of them off",
        last=True,
    ),
)
