"""Configurations that are refused with any of vLLM's connectors: steps, drafts, and ranks."""

from __future__ import annotations

from typing import Any

from kvpatch import admitted
from kvpatch.patches.offloading import (
    connector_rules,
    dtype_rules,
    memory_rules,
    model_rules,
    place,
)
from kvpatch.rules import Check, Rule
from kvpatch.supported import release_of
from kvpatch.upstream import combination, connectors
from kvpatch.versions import Facts, Span, in_words

VALIDATED_SCHEDULERS = (
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
)
# vLLM's methods of speculative decoding, by their names in the matrix.
DRAFTING = {
    "ngram": "ngram",
    "draft_model": "draft model",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "mtp": "mtp",
    "dflash": "dflash",
    "dspark": "dspark",
}
# Two stages of a pipeline: the name of their cells, by the ranks of each.
STAGES = {1: "2 stages", 2: "2 stages of 2 ranks"}
# Where windows have groups of their own by default.
HYBRID_MANAGER = Span("0.22")
# Where drafts by mtp leave nothing to be found beside windows.
NOTHING_BESIDE_MTP = Span("0.33", "0.34")
# Where chunks are stored of which a window has left a part.
WINDOWS_IN_PARTS = Span("0", "0.33")

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


def _scheduler(config: Any) -> str | None:
    requested = config.scheduler_config.scheduler_cls
    if requested is None or not isinstance(requested, type):
        return requested
    return f"{requested.__module__}.{requested.__qualname__}"


def _other_drafts(config: Any, facts: Facts) -> bool:
    """Return whether drafts are made that were not compared; what is beside them is in pairs."""
    drafting = config.speculative_config
    return (
        drafting is not None
        and not place.starts_with(DRAFTING.get(drafting.method, ""), config, facts)
        and not (release_of(facts.vllm) in NOTHING_BESIDE_MTP and _finds_nothing(config, facts))
    )


def _finds_nothing(config: Any, facts: Facts) -> bool:
    """Return whether vLLM stores what drafts by mtp need, and finds none of it again."""
    drafting, model = config.speculative_config, config.model_config
    return (
        drafting is not None
        and drafting.method == "mtp"
        and all(one.name == connectors.OFFLOADING for one in connector_rules.leaves(config))
        and (has_chunks(config, facts) if place.is_hybrid(model) else place.has_windows(model))
    )


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
    chunks = any(
        leaf.extra.get("block_size") is not None or int(leaf.extra.get("blocks_per_chunk") or 1) > 1
        for leaf in connectors.offloading(config.kv_transfer_config)
    )
    return chunks and place.has_windows(config.model_config)


def has_chunks(config: Any, facts: Facts) -> bool:
    """Return whether chunks have several blocks."""
    block = getattr(config.cache_config, "block_size", None)
    return any(
        leaf.extra.get("block_size") not in (None, block)
        or int(leaf.extra.get("blocks_per_chunk") or 1) > 1
        for leaf in connectors.offloading(config.kv_transfer_config)
    )


def has_threshold(config: Any, facts: Facts) -> bool:
    """Return whether blocks are stored at a later use than the first."""
    return any(
        int(leaf.extra.get("store_threshold") or 0) > 1
        for leaf in connectors.offloading(config.kv_transfer_config)
    )


def has_no_hybrid_manager(config: Any, facts: Facts) -> bool:
    """Return whether windows are kept whole, where that is not vLLM's default."""
    return (
        bool(config.scheduler_config.disable_hybrid_kv_cache_manager)
        and place.has_windows(config.model_config)
        and release_of(facts.vllm) in HYBRID_MANAGER
    )


def has_whole_prompts(config: Any, facts: Facts) -> bool:
    """Return whether prompts are not split; on a CPU vLLM splits none with latent attention."""
    latent = config.model_config is not None and config.model_config.use_mla
    return not config.scheduler_config.enable_chunked_prefill and not latent


def _did_not_run(has: Check, feature: str) -> Check:
    return lambda config, facts: (
        has(config, facts) and not place.starts_with(feature, config, facts)
    )


def _never_set(config: Any) -> list[str]:
    found = [path for path in NEVER_SET if combination.settings(config, [path])[path]]
    # vLLM waits with the blocks of a request that ended for steps in flight if it also loads.
    if getattr(config.kv_transfer_config, "kv_role", None) not in (None, "kv_both"):
        found.append("kv_transfer_config.kv_role")
    return [path.rpartition(".")[2] for path in found]


RULES = (
    *connector_rules.RULES,
    *model_rules.RULES,
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
        "KVP306",
        "offloading with the prefix cache disabled" + admitted.but("no prefix cache"),
        _did_not_run(
            lambda config, facts: (
                not config.cache_config.enable_prefix_caching
                and all(one.name == connectors.OFFLOADING for one in connector_rules.leaves(config))
            ),
            "no prefix cache",
        ),
        "the prefix cache is disabled while a KV connector is configured",
        admitted.why("no prefix cache"),
        "remove --no-enable-prefix-caching",
    ),
    Rule(
        "KVP357",
        "offloading with chunked prefill disabled, of models without latent attention"
        + admitted.but("whole prompts"),
        _did_not_run(has_whole_prompts, "whole prompts"),
        "chunked prefill is disabled while a KV connector is configured",
        admitted.why("whole prompts"),
        "remove --no-enable-chunked-prefill",
    ),
    Rule(
        "KVP358",
        "`store_threshold`" + admitted.but("store threshold"),
        _did_not_run(has_threshold, "store threshold"),
        "store_threshold is set in kv_connector_extra_config",
        admitted.why("store threshold"),
        "remove store_threshold",
    ),
    Rule(
        "KVP359",
        "chunks of several blocks (`block_size` or `blocks_per_chunk` in "
        "kv_connector_extra_config)" + admitted.but("chunks"),
        _did_not_run(
            lambda config, facts: (
                has_chunks(config, facts)
                and not (
                    release_of(facts.vllm) in WINDOWS_IN_PARTS
                    and place.has_windows(config.model_config)
                )  # KVP355
            ),
            "chunks",
        ),
        "chunks of several blocks are configured in kv_connector_extra_config",
        admitted.why("chunks"),
        "remove block_size and blocks_per_chunk from kv_connector_extra_config",
    ),
    Rule(
        "KVP360",
        "models with sliding windows without the hybrid KV cache manager, from vLLM 0.22 on"
        + admitted.but("no hybrid manager"),
        _did_not_run(has_no_hybrid_manager, "no hybrid manager"),
        "the hybrid KV cache manager is disabled for a model with sliding windows, and a KV "
        "connector is configured",
        admitted.why("no hybrid manager"),
        "remove --disable-hybrid-kv-cache-manager",
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
        "KVP395",
        "OffloadingConnector with drafts by `mtp` on vLLM 0.33, for models with sliding windows, "
        "and for hybrid models with chunks of several blocks",
        _finds_nothing,
        "OffloadingConnector is configured with drafts by mtp, for a model with sliding windows or "
        "a hybrid model with chunks of several blocks",
        "vLLM 0.33 finds nothing of it again in the CPU tier, with kvpatch and without",
        "remove the speculative configuration, or use SimpleCPUOffloadConnector, or for a hybrid "
        "model remove block_size and blocks_per_chunk from kv_connector_extra_config",
        only_in=NOTHING_BESIDE_MTP,
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
        "KVP390",
        "offloading with "
        + in_words([f"`{path.rpartition('.')[2]}`" for path in NEVER_SET])
        + ", or a `kv_role` other than `kv_both`",
        lambda config, facts: bool(_never_set(config)),
        lambda config, facts: f"a KV connector is configured, and {_never_set(config)[0]} is set",
        "with that setting no KV connector is validated",
        "leave it at vLLM's default (for kv_role, set kv_both)",
    ),
    *dtype_rules.RULES,
    *memory_rules.RULES,
)
