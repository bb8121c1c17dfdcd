"""Models that are refused with any of vLLM's connectors, and experts over several ranks."""

from __future__ import annotations

from typing import Any

from kvpatch import admitted
from kvpatch.patches.offloading import place
from kvpatch.patches.offloading.connector_rules import has_tiers
from kvpatch.rules import Rule
from kvpatch.supported import in_ranges, is_validated, validated
from kvpatch.upstream import connectors
from kvpatch.versions import Facts, Span

# Experts over several ranks: the name of their runs, by whether each rank has experts of its own.
EXPERTS = {False: "experts", True: "expert parallelism"}
DELTA = "gated delta net"  # the name of the runs of a hybrid with such states
SEVERAL_RANKS = "2 ranks"  # of tensor parallelism, by the name of its cells
_RANKS = (place.ALONE, SEVERAL_RANKS)
# Where models that are run for their pooled states were compared. SimpleCPUOffloadConnector of
# earlier releases stores nothing of a request that ends in its first step.
POOLED = {connectors.OFFLOADING: Span("0.28"), connectors.SIMPLE: Span("0.30")}
_POOLED = (
    " or ".join(f"with {one} on vLLM {in_ranges(validated(at))}" for one, at in POOLED.items())
    + ", of full attention, with one rank and no secondary tiers"
)


def _latent(config: Any, facts: Facts) -> bool:
    """Return whether a model that is no hybrid has latent attention, where that did not run."""
    if place.kind_of(config.model_config) not in (place.LATENT, place.SPARSE):
        return False
    return not _windows_of_latents(config, facts) and not _ran_on_ranks(config, facts)


def _windows_of_latents(config: Any, facts: Facts) -> bool:
    """Return whether a model keeps windows of compressed latents, on Model Runner V2."""
    text = getattr(config.model_config, "hf_text_config", None)
    compresses = any(getattr(text, name, None) for name in ("compress_rates", "compress_ratios"))
    return compresses and getattr(config, "use_v2_model_runner", False)


def _hybrid(config: Any, facts: Facts) -> bool:
    """Return whether a model is hybrid, where that did not run; none with latent attention did."""
    model = config.model_config
    return place.is_hybrid(model) and (model.use_mla or not _ran_on_ranks(config, facts))


def _delta_nets(config: Any, facts: Facts) -> bool:
    """Return whether a hybrid has states of a kind that did not run; Mamba2's did (KVP311)."""
    has = place.has_delta_nets(config.model_config)
    return has and not place.ran_with(DELTA, config, facts)


def _ran_on_ranks(config: Any, facts: Facts) -> bool:
    """Return whether a kind of model ran alone, or on several ranks if the configuration has."""
    several = config.parallel_config.world_size > 1
    return place.starts_with(SEVERAL_RANKS if several else place.ALONE, config, facts)


def _pooling(config: Any, facts: Facts) -> bool:
    model = config.model_config
    span = POOLED.get(config.kv_transfer_config.kv_connector)
    return getattr(model, "runner_type", "") == "pooling" and not (
        span is not None
        and is_validated(facts.vllm, span)
        and place.kind_of(model) == place.FULL
        and config.parallel_config.world_size == 1
        and not has_tiers(config)
    )


def spreads_experts(config: Any) -> bool:
    """Return whether each rank has experts of its own; of several engines KVP374 says it."""
    parallel = config.parallel_config
    return getattr(parallel, "enable_expert_parallel", False) and parallel.tensor_parallel_size > 1


def _has_experts(model: Any) -> bool:
    """Return whether a layer has experts; vLLM counts those that config.json names."""
    text = getattr(model, "hf_text_config", None)
    dense = getattr(text, "first_k_dense_replace", None) or 0
    return getattr(model, "is_moe", False) and dense < getattr(text, "num_hidden_layers", dense + 1)


def _experts(config: Any, facts: Facts) -> bool:
    ranks = config.parallel_config.tensor_parallel_size
    divided = ranks > 1 and _has_experts(config.model_config)
    apart = spreads_experts(config)
    return (divided or apart) and not place.ran_with(EXPERTS[apart], config, facts)


def _two_block_sizes(config: Any, facts: Facts) -> bool:
    """Return whether blocks of windows have more tokens than those of full attention (Gemma 4)."""
    text = getattr(config.model_config, "hf_text_config", None)
    return (
        not facts.contiguous
        and bool(getattr(text, "global_head_dim", None))
        and bool(connectors.offloading(config.kv_transfer_config))
    )


def _model(config: Any, facts: Facts) -> str:
    return f"a KV connector is configured for {config.model_config.architecture}"


RULES = (
    Rule(
        "KVP356",
        "models whose heads have two sizes (Gemma 4) on memory that is not contiguous, before vLLM "
        "0.30",
        _two_block_sizes,
        "kvcached's memory is not contiguous and the heads of this model have two sizes",
        "a load that ends within a block of a window ends the engine",
        "leave KVCACHED_CONTIGUOUS_LAYOUT unset, or install vLLM 0.30 or later",
        only_in=Span("0", "0.30"),
    ),
    Rule(
        "KVP393",
        "offloading of models that keep windows of compressed latents (DeepSeek-V4)",
        _windows_of_latents,
        _model,
        "kvcached takes no KV cache of sliding windows of latents (vLLM's SlidingWindowMLASpec)",
        "run this model without kvcached (ENABLE_KVCACHED=false)",
    ),
    Rule(  # before the next rule: on a CPU vLLM disables the prefix cache for these models
        "KVP305",
        "offloading of models with latent attention (MLA)"
        + admitted.but(*_RANKS, model=place.LATENT),
        _latent,
        _model,
        f"latent attention is validated {admitted.where(*_RANKS, model=place.LATENT)}; with an "
        f"indexer (index_topk) {admitted.where(*_RANKS, model=place.SPARSE)}",
        "use one of these, or run this model without a KV connector",
    ),
    Rule(
        "KVP311",
        "offloading of hybrid models" + admitted.but(*_RANKS, model=place.HYBRID),
        _hybrid,
        _model,
        "hybrid models are validated " + admitted.where(*_RANKS, model=place.HYBRID),
        "use one of these, or run this model without a KV connector",
    ),
    Rule(
        "KVP394",
        "offloading of hybrid models of gated delta nets (Qwen3-Next, Qwen3.5), except where "
        "engines ran",
        _delta_nets,
        lambda config, facts: f"{_model(config, facts)}, a hybrid of gated delta nets",
        f"they are validated {admitted.with_connectors(DELTA)}",
        "use one of these, or run this model without a KV connector",
    ),
    Rule(
        "KVP331",
        "offloading of encoder-decoder models",
        lambda config, facts: (
            config.model_config is not None and config.model_config.is_encoder_decoder
        ),
        _model,
        "encoder-decoder models are not validated",
        "run this model without a KV connector",
    ),
    Rule(
        "KVP361",
        f"offloading of pooling models, except {_POOLED}",
        _pooling,
        lambda config, facts: f"{_model(config, facts)}, which is run for its pooled states",
        f"that is validated {_POOLED} only",
        "use one of these so, or run this model without a KV connector",
    ),
    Rule(
        "KVP389",
        "offloading of a model of experts over several ranks, except where engines ran",
        _experts,
        lambda config, facts: (
            "a KV connector is configured with experts over several ranks"
            + (" and expert parallelism" if spreads_experts(config) else "")
        ),
        f"it is validated {admitted.with_connectors(EXPERTS[False])}, and with expert parallelism "
        f"{admitted.with_connectors(EXPERTS[True])}",
        "take a release and connector with which it is validated",
    ),
)
