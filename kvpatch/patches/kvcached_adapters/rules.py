"""Configurations that kvcached does not support, or is not validated with, on a release."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from kvpatch import admitted
from kvpatch.environ import (
    KVCACHED_CONTIGUOUS,
    VLLM_KV_CACHE_LAYOUT,
    VLLM_USE_RUST_FRONTEND,
    VLLM_USE_V2_MODEL_RUNNER,
)
from kvpatch.patches.offloading import place
from kvpatch.rules import Rule
from kvpatch.supported import in_ranges, release_of, validated
from kvpatch.upstream.kvcached_api import LAYOUTS, conflicting_layout
from kvpatch.versions import Facts, Span

EXTENSIBLE = "enable_extensible_kv_cache"  # of vllm-project/vllm#56492; in no release up to 0.33
V1_ON_LATER = Span("0.29")  # where kvcached supports Runner V2 only


def runs_v2(config: Any, facts: Facts) -> bool:
    """Return whether a configuration runs on Model Runner V2."""
    # Up to 0.21 the variable alone decides, and the configuration has no such attribute.
    by_variable = facts.environment.get(VLLM_USE_V2_MODEL_RUNNER.name, "0") not in ("", "0")
    return bool(getattr(config, "use_v2_model_runner", by_variable))


def _rust_frontend(config: Any, facts: Facts) -> bool:
    return VLLM_USE_RUST_FRONTEND.read(facts.environment) not in ("", "0")


def _hybrid_without_kvcached(config: Any, facts: Facts) -> bool:
    if not place.is_hybrid(config.model_config):
        return False
    release = release_of(facts.vllm)
    if release < Version("0.29") or (release < Version("0.31") and runs_v2(config, facts)):
        return False  # kvcached's own
    ran = place.cell(config, facts, place.OFFLOADING)
    return not admitted.admits(place.ALONE, facts.vllm, [ran])


RULES = (
    Rule(
        "KVP301",
        f"Model Runner V1 from vLLM 0.29 on, except on vLLM {in_ranges(validated(V1_ON_LATER))}",
        lambda config, facts: not config.use_v2_model_runner,
        "this configuration runs on Model Runner V1",
        "kvcached does not support it on this release; kvpatch's adapter is validated on vLLM "
        f"{in_ranges(validated(V1_ON_LATER))} only",
        "use Model Runner V2",
        only_in=V1_ON_LATER,
        unless_validated=V1_ON_LATER,
        with_connector=False,
    ),
    Rule(
        "KVP313",
        "hybrid models on Model Runner V1 from vLLM 0.29 on, and on V2 from 0.31 on"
        + admitted.but(place.ALONE, model=place.HYBRID),
        _hybrid_without_kvcached,
        lambda config, facts: f"{config.model_config.architecture} has state-space layers",
        "kvcached's patches for them are not for this runner of this release, and kvpatch's are "
        f"validated {admitted.where(place.ALONE, model=place.HYBRID)}",
        "use one of these",
        with_connector=False,
    ),
    Rule(
        "KVP314",
        f"a `{VLLM_KV_CACHE_LAYOUT}` that kvcached's memory cannot have, from vLLM 0.29 on",
        lambda config, facts: bool(conflicting_layout(facts)),
        lambda config, facts: (
            f"{VLLM_KV_CACHE_LAYOUT}={conflicting_layout(facts)} is set and kvcached's memory "
            f"{'is' if facts.contiguous else 'is not'} contiguous"
        ),
        f"kvcached supports {' or '.join(LAYOUTS[True])} there, and with "
        f"{KVCACHED_CONTIGUOUS}=false {' or '.join(LAYOUTS[False][:2])}",
        f"unset {VLLM_KV_CACHE_LAYOUT} or change {KVCACHED_CONTIGUOUS}",
        only_in=Span("0.29"),
        with_connector=False,
    ),
    Rule(
        "KVP326",
        "Model Runner V2 before vLLM 0.28",
        runs_v2,
        "this configuration runs on Model Runner V2",
        "kvcached has no adapter for it before vLLM 0.28",
        f"unset {VLLM_USE_V2_MODEL_RUNNER}, and use vLLM 0.28 or later for a model that needs V2",
        only_in=Span("0", "0.28"),
        with_connector=False,
    ),
    Rule(
        "KVP363",
        "hybrid models on Model Runner V2 of vLLM 0.28",
        lambda config, facts: place.is_hybrid(config.model_config) and runs_v2(config, facts),
        lambda config, facts: f"{config.model_config.architecture} runs on Model Runner V2",
        "kvcached has no state-space layers on that runner of this release",
        f"unset {VLLM_USE_V2_MODEL_RUNNER}, or install vLLM 0.29 or later",
        only_in=Span("0.28", "0.29"),
        with_connector=False,
    ),
    Rule(
        "KVP387",
        f"vLLM's Rust frontend (`{VLLM_USE_RUST_FRONTEND}=1`)",
        _rust_frontend,
        f"{VLLM_USE_RUST_FRONTEND} is set",
        "the stats that kvpatch adds to those of an engine are validated with vLLM's Python "
        "frontend only, which decodes them and serves /metrics",
        f"unset {VLLM_USE_RUST_FRONTEND}",
        with_connector=False,
    ),
    Rule(
        "KVP388",
        "vLLM's own extensible KV cache (`--enable-extensible-kv-cache`)",
        lambda config, facts: bool(getattr(config.cache_config, EXTENSIBLE, False)),
        f"{EXTENSIBLE} is set",
        "vLLM then maps the KV cache's memory by itself after its warm-up, and kvcached never does",
        "remove --enable-extensible-kv-cache: kvcached's memory grows, and is given back",
        with_connector=False,
    ),
)
