"""Configurations that are refused with any of vLLM's connectors."""

from __future__ import annotations

from typing import Any

from kvpatch import admitted, distributions
from kvpatch.patches.offloading import memory_rules, place
from kvpatch.rules import Rule
from kvpatch.supported import FP8, in_ranges, is_validated, release_of, validated
from kvpatch.upstream import combination, connectors
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
VALIDATED_SCHEDULERS = (
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
)
VALIDATED_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32")
FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")  # on the releases of ``supported.FP8``
MULTI = Span("0.16")
# Where a checkpoint's kv_cache_scheme wins over --kv-cache-dtype, in vLLM's Attention.__init__.
SCHEME_WINS = Span("0", "0.22")
# vLLM's methods of speculative decoding, by their names in the matrix.
DRAFTING = {"ngram": "ngram", "draft_model": "draft model", "eagle": "EAGLE", "mtp": "mtp"}
# Experts over several ranks: the name of their runs, by whether each rank has experts of its own.
EXPERTS = {False: "experts", True: "expert parallelism"}
# Two stages of a pipeline: the name of their cells, by the ranks of each.
STAGES = {1: "2 stages", 2: "2 stages of 2 ranks"}
SEVERAL_RANKS = "2 ranks"  # of tensor parallelism, by the name of its cells
_RANKS = (place.ALONE, SEVERAL_RANKS)
# Where models that are run for their pooled states were compared. SimpleCPUOffloadConnector of
# earlier releases stores nothing of a request that ends in its first step.
POOLED = {connectors.OFFLOADING: Span("0.28"), connectors.SIMPLE: Span("0.30")}
# Where windows have groups of their own by default.
HYBRID_MANAGER = Span("0.22")
# Where chunks are stored of which a window has left a part.
WINDOWS_IN_PARTS = Span("0", "0.33")

# Keys of kv_connector_extra_config that no engine ran with, and what is in the table of what ran.
OTHER_KEYS = ("backpressure", "cache_policy_module_path")
SELF_DESCRIBING = "self-describing events"

# Fields of vLLM's configuration that change the KV cache, what is found in it, or the order of
# steps, and that no engine ran with.
NEVER_SET = (
    # A step's batch in parts, on two threads.
    *("parallel_config.enable_dbo", "parallel_config.ubatch_size"),
    "cache_config.kv_sharing_fast_prefill",
    # Where the prefix cache has hits, and what it keeps for them.
    *("cache_config.prefix_match_unit", "cache_config.prefix_cache_retention_interval"),
    *("cache_config.enable_mamba_shared_prefix_checkpoint", "cache_config.use_replayssm"),
    "speculative_config.disable_eagle_block_drop",
    "speculative_config.disable_lookahead_block_hashes",
    "speculative_config.num_speculative_tokens_per_batch_size",
    "ec_transfer_config.ec_connector",
)

# Register a KV cache once, at the start, for transfers that its engine does not begin.
REGISTERING = (
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
    *("MooncakeConnector", "MooncakeStoreConnector", "MoRIIOConnector"),
)

ROUND_TRIP = "it has not been validated by a store and load round trip"


_POOLED = (
    " or ".join(f"with {one} on vLLM {in_ranges(validated(at))}" for one, at in POOLED.items())
    + ", of full attention, with one rank and no secondary tiers"
)
_FP8 = (
    f"on vLLM {in_ranges(validated(FP8))}, in all layers of a model of full attention alone and "
    "without --calculate-kv-scales, and of a hybrid one "
    + admitted.where("fp8", model=place.HYBRID)
)


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
        name = leaf.extra.get("spec_name", "CPUOffloadingSpec")
        own = name in ("CPUOffloadingSpec", "TieringOffloadingSpec")  # vLLM's, for any path
        if (name, None if own else leaf.extra.get("spec_module_path")) not in VALIDATED_SPECS:
            found.append(name)
    return found


def _scheduler(config: Any) -> str | None:
    """Return the full name of the requested scheduler class; None is vLLM's choice."""
    requested = config.scheduler_config.scheduler_cls
    if requested is None or not isinstance(requested, type):
        return requested
    return f"{requested.__module__}.{requested.__qualname__}"


def _latent(config: Any, facts: Facts) -> bool:
    """Return whether a model has latent attention, where that did not run.

    Those of hybrid models are refused with these.
    """
    if place.kind_of(config.model_config) != place.LATENT:
        return False
    if getattr(getattr(config.model_config, "hf_text_config", None), "index_topk", None):
        return True  # an indexer, whose keys are in a group of their own
    return not _ran_on_ranks(config, facts)


def _hybrid(config: Any, facts: Facts) -> bool:
    """Return whether a model is hybrid, where that did not run; none with latent attention did."""
    model = config.model_config
    return place.is_hybrid(model) and (model.use_mla or not _ran_on_ranks(config, facts))


def _ran_on_ranks(config: Any, facts: Facts) -> bool:
    """Return whether a kind of model ran alone, or on several ranks if the configuration has."""
    several = config.parallel_config.world_size > 1
    return place.starts_with(SEVERAL_RANKS if several else place.ALONE, config, facts)


def _pooling(config: Any, facts: Facts) -> bool:
    """Return whether a model is run for its pooled states, where that did not run."""
    model = config.model_config
    span = POOLED.get(config.kv_transfer_config.kv_connector)
    return getattr(model, "runner_type", "") == "pooling" and not (
        span is not None
        and is_validated(facts.vllm, span)
        and place.kind_of(model) == place.FULL
        and config.parallel_config.world_size == 1
        and not has_tiers(config)
    )


def _other_drafts(config: Any, facts: Facts) -> bool:
    """Return whether drafts are made that were not compared; what is beside them is in pairs."""
    drafting = config.speculative_config
    return drafting is not None and not place.starts_with(
        DRAFTING.get(drafting.method, ""), config, facts
    )


def _has_scheme(config: Any) -> bool:
    """Return whether the layers make an fp8 KV cache of the dtype ``auto``.

    As ``Attention.__init__`` decides, in the worker, from the same object. MLA layers do not.
    """
    scheme = getattr(getattr(config, "quant_config", None), "kv_cache_scheme", None)
    model = config.model_config
    return scheme is not None and not (model is not None and model.use_mla)


def _by_scheme(config: Any, facts: Facts) -> bool:
    """Return whether the dtype ``auto`` becomes fp8; up to 0.21 every dtype does, see KVP340."""
    obeys = release_of(facts.vllm) not in SCHEME_WINS
    return obeys and config.cache_config.cache_dtype == "auto" and _has_scheme(config)


def is_fp8(config: Any, facts: Facts) -> bool:
    """Return whether the KV cache is fp8, by the setting or by the checkpoint."""
    return _by_scheme(config, facts) or config.cache_config.cache_dtype in FP8_CACHE_DTYPES


def _other_dtype(config: Any, facts: Facts) -> bool:
    if is_fp8(config, facts):
        return not _validated_fp8(config, facts)
    return config.cache_config.cache_dtype not in VALIDATED_CACHE_DTYPES


def _validated_fp8(config: Any, facts: Facts) -> bool:
    """Return whether an fp8 KV cache was compared.

    That of all attention layers, of other models than those of full attention where it ran, with
    the scales of the checkpoint: scales that the first requests decide are those of one engine, and
    a secondary tier serves several. What is beside it, such as several ranks, is in pairs.
    """
    cache, kind = config.cache_config, place.kind_of(config.model_config)
    return (
        is_validated(facts.vllm, FP8)
        and (kind == place.FULL or place.starts_with("fp8", config, facts))
        and not getattr(cache, "calculate_kv_scales", False)
        and not getattr(cache, "kv_cache_dtype_skip_layers", ())
    )


def _cache_dtype(config: Any, facts: Facts) -> str:
    """Return the dtype of the KV cache, with what it was not compared with."""
    by = ", by the checkpoint's kv_cache_scheme," if _by_scheme(config, facts) else ""
    name = f"fp8{by}" if by else str(config.cache_config.cache_dtype)
    if not is_fp8(config, facts):
        return name
    kind = place.kind_of(config.model_config)
    if kind not in ("", place.FULL):
        return f"{name} for a model that is not of full attention alone ({kind})"
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return f"{name} and --calculate-kv-scales"
    if getattr(config.cache_config, "kv_cache_dtype_skip_layers", ()):
        return f"{name} in some of the layers"
    return name.rstrip(",")


def _other_parallelism(config: Any, facts: Facts) -> bool:
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        return True
    if parallel.world_size == parallel.tensor_parallel_size:
        return False
    ranks = parallel.tensor_parallel_size
    in_stages = parallel.world_size == 2 * ranks and parallel.pipeline_parallel_size == 2
    return not in_stages or not place.starts_with(STAGES.get(ranks, ""), config, facts)


def _chunks_of_windows(config: Any, facts: Facts) -> bool:
    """Return whether a chunk may have blocks that a window has left.

    Chunks have ``blocks_per_chunk`` blocks, or up to 0.25 and in later ones as well ``block_size``
    tokens. Blocks of windows have their own size, so that any size of a chunk counts.
    """
    model = config.model_config
    chunks = any(
        leaf.extra.get("block_size") is not None or int(leaf.extra.get("blocks_per_chunk") or 1) > 1
        for leaf in connectors.offloading(config.kv_transfer_config)
    )
    return chunks and model is not None and model.get_sliding_window() is not None


def has_chunks(config: Any) -> bool:
    """Return whether chunks have several blocks."""
    block = getattr(config.cache_config, "block_size", None)
    return any(
        leaf.extra.get("block_size") not in (None, block)
        or int(leaf.extra.get("blocks_per_chunk") or 1) > 1
        for leaf in connectors.offloading(config.kv_transfer_config)
    )


def _chunks(config: Any, facts: Facts) -> bool:
    """Return whether chunks of several blocks did not run."""
    if place.has_windows(config.model_config) and release_of(facts.vllm) in WINDOWS_IN_PARTS:
        return False  # KVP355
    return has_chunks(config) and not place.starts_with("chunks", config, facts)


def has_threshold(config: Any) -> bool:
    """Return whether blocks are stored at a later use than the first."""
    return any(
        int(leaf.extra.get("store_threshold") or 0) > 1
        for leaf in connectors.offloading(config.kv_transfer_config)
    )


def _threshold(config: Any, facts: Facts) -> bool:
    """Return whether blocks are stored at a later use than the first, which did not run."""
    return has_threshold(config) and not place.starts_with("store threshold", config, facts)


def has_no_hybrid_manager(config: Any, facts: Facts) -> bool:
    """Return whether windows are kept whole, where that is not vLLM's default."""
    return (
        bool(config.scheduler_config.disable_hybrid_kv_cache_manager)
        and place.has_windows(config.model_config)
        and release_of(facts.vllm) in HYBRID_MANAGER
    )


def _no_hybrid_manager(config: Any, facts: Facts) -> bool:
    """Return whether windows are kept whole, where that did not run."""
    return has_no_hybrid_manager(config, facts) and not (
        place.starts_with("no hybrid manager", config, facts)
    )


def has_whole_prompts(config: Any) -> bool:
    """Return whether prompts are not split.

    The cells of latent attention ran so: vLLM's CPU backend splits none of their prompts.
    """
    latent = config.model_config is not None and config.model_config.use_mla
    return not config.scheduler_config.enable_chunked_prefill and not latent


def _whole_prompts(config: Any, facts: Facts) -> bool:
    """Return whether prompts are not split, where that did not run."""
    return has_whole_prompts(config) and not place.starts_with("whole prompts", config, facts)


def _other_keys(config: Any, facts: Facts) -> list[str]:
    """Return the keys of OffloadingConnector's extra config that no engine ran with."""
    keys = [key for leaf in leaves(config) for key in OTHER_KEYS if leaf.extra.get(key)]
    ways = place.ways(config.kv_transfer_config)
    if not admitted.ran_with(SELF_DESCRIBING, facts.vllm, ways):
        keys += ["self_describing_kv_events"] * _describes_events(config)
    return keys


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
    """Return whether ranks divide experts among them in a way that did not run."""
    ranks = config.parallel_config.tensor_parallel_size
    divided = ranks > 1 and _has_experts(config.model_config)
    apart = spreads_experts(config)
    return (divided or apart) and not admitted.ran_with(
        EXPERTS[apart], facts.vllm, place.ways(config.kv_transfer_config)
    )


def _never_set(config: Any) -> list[str]:
    """Return the fields of vLLM's configuration that are set and that no engine ran with."""
    found = [path for path in NEVER_SET if combination.settings(config, [path])[path]]
    # vLLM waits with the blocks of a request that ended for steps in flight if it also loads.
    if getattr(config.kv_transfer_config, "kv_role", None) not in (None, "kv_both"):
        found.append("kv_transfer_config.kv_role")
    return [path.rpartition(".")[2] for path in found]


def _describes_events(config: Any) -> bool:
    return any(leaf.extra.get("self_describing_kv_events") for leaf in leaves(config))


def _two_block_sizes(config: Any, facts: Facts) -> bool:
    """Return whether blocks of windows have more tokens than those of full attention.

    As in Gemma 4, whose heads of full attention are larger, where kvcached gives all blocks the
    same bytes.
    """
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
        "KVP365",
        "`secondary_tiers`, or `connectors` of a MultiConnector, that are not a list of objects",
        lambda config, facts: bool(connectors.no_list(config.kv_transfer_config)),
        lambda config, facts: (
            f"{connectors.no_list(config.kv_transfer_config)} is not a list of objects"
        ),
        "vLLM reads the configuration of one tier, or of one connector, from each of them",
        "write a list, also of a single one, as in [{...}]",
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
        "KVP355",
        "`block_size` or `blocks_per_chunk` in kv_connector_extra_config, for a model with sliding "
        "windows before vLLM 0.33",
        _chunks_of_windows,
        "chunks of several blocks are configured for a model with sliding windows",
        "a chunk of which the window has left a part is stored without it, and loaded as a whole",
        "remove block_size and blocks_per_chunk from kv_connector_extra_config, or install vLLM "
        "0.33",
        only_in=WINDOWS_IN_PARTS,
    ),
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
    Rule(  # before the next rule: on a CPU vLLM disables the prefix cache for these models
        "KVP305",
        "offloading of models with latent attention (MLA)"
        + admitted.but(*_RANKS, model=place.LATENT),
        _latent,
        _model,
        "latent attention is validated "
        + admitted.where(*_RANKS, model=place.LATENT)
        + ", and with an indexer (index_topk) nowhere: plain vLLM's CPU build ends with `Sparse "
        "Attention is not supported on CPU`",
        "use one of these, or run this model without a KV connector",
    ),
    Rule(
        "KVP306",
        "offloading with the prefix cache disabled" + admitted.but("no prefix cache"),
        lambda config, facts: (
            not config.cache_config.enable_prefix_caching
            and len(connectors.offloading(config.kv_transfer_config)) == len(leaves(config))
            and not place.starts_with("no prefix cache", config, facts)
        ),
        "the prefix cache is disabled while a KV connector is configured",
        admitted.why("no prefix cache"),
        "remove --no-enable-prefix-caching",
    ),
    Rule(
        "KVP357",
        "offloading with chunked prefill disabled, of models without latent attention"
        + admitted.but("whole prompts"),
        _whole_prompts,
        "chunked prefill is disabled while a KV connector is configured",
        admitted.why("whole prompts"),
        "remove --no-enable-chunked-prefill",
    ),
    Rule(
        "KVP358",
        "`store_threshold`" + admitted.but("store threshold"),
        _threshold,
        "store_threshold is set in kv_connector_extra_config",
        admitted.why("store threshold"),
        "remove store_threshold",
    ),
    Rule(
        "KVP359",
        "chunks of several blocks (`block_size` or `blocks_per_chunk` in "
        "kv_connector_extra_config)" + admitted.but("chunks"),
        _chunks,
        "chunks of several blocks are configured in kv_connector_extra_config",
        admitted.why("chunks"),
        "remove block_size and blocks_per_chunk from kv_connector_extra_config",
    ),
    Rule(
        "KVP360",
        "models with sliding windows without the hybrid KV cache manager, from vLLM 0.22 on"
        + admitted.but("no hybrid manager"),
        _no_hybrid_manager,
        "the hybrid KV cache manager is disabled for a model with sliding windows, and a KV "
        "connector is configured",
        admitted.why("no hybrid manager"),
        "remove --disable-hybrid-kv-cache-manager",
        only_in=HYBRID_MANAGER,
    ),
    Rule(
        "KVP307",
        "offloading with parallelism other than tensor parallelism"
        + admitted.but(*STAGES.values(), how="with two stages of a pipeline, of one or two ranks"),
        _other_parallelism,
        "a KV connector is configured with parallelism other than tensor parallelism",
        "that combination is not validated",
        "use tensor parallelism only",
    ),
    Rule(
        "KVP308",
        "offloading with an executor other than `uni` and `mp`",
        lambda config, facts: (
            config.parallel_config.distributed_executor_backend not in (None, "uni", "mp")
        ),
        lambda config, facts: (
            "a KV connector is configured with the executor "
            f"{config.parallel_config.distributed_executor_backend}"
        ),
        "kvpatch is validated with the executors uni and mp only",
        "set --distributed-executor-backend mp",
    ),
    Rule(
        "KVP324",
        "offloading with a scheduler class other than vLLM's own two",
        lambda config, facts: _scheduler(config) not in (None, *VALIDATED_SCHEDULERS),
        lambda config, facts: (
            f"a KV connector is configured with the scheduler {_scheduler(config)}"
        ),
        "it is not validated: it may free or allocate blocks in an order that the fence does not "
        "expect",
        "remove --scheduler-cls",
    ),
    Rule(
        "KVP309",
        "offloading with speculative decoding" + admitted.but(*DRAFTING.values()),
        _other_drafts,
        lambda config, facts: (
            "a KV connector is configured with speculative decoding by "
            f"{config.speculative_config.method}"
        ),
        admitted.why(*DRAFTING.values()),
        "remove the speculative configuration",
    ),
    Rule(  # before the next rule, whose remedy is of no use there
        "KVP340",
        "offloading of checkpoints with a `kv_cache_scheme` before vLLM 0.22",
        lambda config, facts: _has_scheme(config),
        "a KV connector is configured for a checkpoint with a kv_cache_scheme",
        "before vLLM 0.22 that makes its KV cache fp8 whatever --kv-cache-dtype says, which has "
        "not been validated by a store and load round trip",
        "install vLLM 0.22.1 and set --kv-cache-dtype bfloat16, or take kv_cache_scheme out of "
        "the checkpoint's config.json",
        only_in=SCHEME_WINS,
    ),
    Rule(
        "KVP310",
        "offloading with KV cache dtypes other than the ones above, also where the checkpoint "
        f"asks for it (`kv_cache_quant_algo`, `kv_cache_scheme`); fp8 except {_FP8}",
        _other_dtype,
        lambda config, facts: (
            "a KV connector is configured with the KV cache dtype " + _cache_dtype(config, facts)
        ),
        f"of all dtypes that are not a model's own only fp8 is validated, {_FP8} (with latent "
        "attention plain vLLM's CPU build ends with `--kv-cache-dtype fp8 is not supported by MLA "
        "attention on CPU`)",
        "set --kv-cache-dtype bfloat16, and --dtype bfloat16 if the model is not (auto takes "
        "what the checkpoint asks for)",
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
        "KVP332",
        "offloading with LoRA adapters",
        lambda config, facts: getattr(config, "lora_config", None) is not None,
        "a KV connector is configured with LoRA",
        "vLLM names a block after its adapter's name and not its content "
        "(vllm-project/vllm#27211), so that an adapter that was trained again or loaded in place "
        "would get blocks of the old one",
        "remove --enable-lora, or run this model without a KV connector",
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
    Rule(
        "KVP390",
        "offloading with "
        + in_words([f"`{path.rpartition('.')[2]}`" for path in NEVER_SET])
        + ", or a `kv_role` other than `kv_both`",
        lambda config, facts: bool(_never_set(config)),
        lambda config, facts: f"a KV connector is configured, and {_never_set(config)[0]} is set",
        "with that setting no KV connector is validated",
        "leave it at vLLM's default (for kv_role, set kv_both)",
    ),
    *memory_rules.RULES,
)
