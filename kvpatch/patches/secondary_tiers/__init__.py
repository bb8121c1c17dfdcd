"""vLLM's secondary tiers (TieringOffloadingSpec) on kvcached's memory and on faulty disks."""

from __future__ import annotations

from kvpatch.patch import WITH_TIERS
from kvpatch.rows import Row, feature, replacement, seam
from kvpatch.upstream.targets import ENGINE_CORE, OFFLOADING

_KV_OFFLOAD = "vllm.v1.kv_offload"
_FS = f"{_KV_OFFLOAD}.tiering.fs.manager"
_SCHEDULER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_MANAGER = f"{_KV_OFFLOAD}.tiering.manager:TieringOffloadingManager"
_KEPT = (
    "none: vLLM keeps the files of a tier on purpose, see reset_cache",
    "vLLM names files after the weights",
)
_UNVERIFIED = (
    "vllm-project/vllm#49176 (damaged files; those of full length pass)",
    "vLLM's fs tier verifies what it reads",
)
_ADMITTED = (
    "vllm-project/vllm#57841, vllm-project/vllm#45388",
    "vLLM admits no load behind a waiting request",
)

FEATURE = feature(
    __name__,
    summary="the fs tier returns exactly the bytes stored, and is shared only between engines "
    "with the same KV layout, configuration and weights",
    since="0.24",
    rules="rules:RULES",
    optional=True,
    seams=(
        Row(
            "secondary_tiers.shared_memory",
            f"{ENGINE_CORE}.__init__",
            "shared_memory:around_engine_core(vllm_config)",
            "two engines with one engine_id share one primary tier, and load wrong KV",
            "none: vLLM opens existing memory of that name",
            "vLLM refuses memory that another engine created",
            since="0.26",
            earlier="vLLM names the memory after a random id",
        ),
        Row(
            "secondary_tiers.shared_region",
            f"{_KV_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion.__init__",
            "shared_memory:around_region(self, rank)",
            "memory that another user made under this name is joined, and read by him; if the "
            "name is removed while the engine starts, a tier stores the bytes of another file",
            "none: vLLM opens existing memory of that name, and makes what is missing",
            "vLLM checks the owner of the memory that it opens, and gives the scheduler the "
            "workers' memory",
        ),
        Row(
            "secondary_tiers.shared_parts",
            f"{ENGINE_CORE}._initialize_kv_caches",
            "parts:around_kv_caches(self, vllm_config)",
            "the parts of a killed engine's memory stay, and no engine with its engine_id "
            "starts again",
            "none: vLLM opens each part but the first exclusively",
            "vLLM removes the parts that a killed engine left",
            since="0.33",
            earlier="the memory is one file",
        ),
        Row(
            "secondary_tiers.describe",
            f"{ENGINE_CORE}._initialize_kv_caches",
            "fingerprint:around_kv_caches(self, vllm_config)",
            "the block layout is known only in the workers, and tiers run elsewhere",
            "none: there is no hook between workers and tiers",
            "vLLM names files after the layout of their content",
            only_with=WITH_TIERS,
        ),
        Row(
            "secondary_tiers.worker_calls",
            f"{ENGINE_CORE}.collective_rpc",
            "weights:around_call(self, method)",
            "weights that are replaced in a running engine leave the files of the old ones",
            *_KEPT,
        ),
        Row(
            "secondary_tiers.wake_up",
            f"{ENGINE_CORE}.wake_up",
            "weights:around_call",
            "as secondary_tiers.worker_calls; sleep level 2 drops the weights",
            *_KEPT,
        ),
        Row(
            "secondary_tiers.reset_caches",
            f"{ENGINE_CORE}.reset_prefix_cache",
            "weights:around_reset",  # of kvcached's wrapper, which takes any arguments
            "as secondary_tiers.worker_calls; after a reset no cache has the old weights' blocks",
            *_KEPT,
        ),
        Row(
            "secondary_tiers.file_mapper",
            f"{_KV_OFFLOAD}.file_mapper:FileMapper.from_offloading_spec",
            "fingerprint:around_file_mapper(root_dir, offloading_spec, parallel_agnostic)",
            "engines with different layouts or weights share files and load wrong KV",
            "vllm-project/vllm#48408 (the layout of stored blocks, by layer)",
            "vLLM names files after the layout of their content",
            only_with=WITH_TIERS,
        ),
        seam(
            replacement(
                "secondary_tiers.store_blocks",
                f"{_FS}:batch_store_block",
                "block_files:replace_store(paths, view, offsets, block_size, use_o_direct)",
                "files have no checksum, and are readable by every user",
                *_UNVERIFIED,
                since="0.27",
                only_with=WITH_TIERS,
            ),
            Row(
                "secondary_tiers.store_block",
                f"{_FS}:store_block",
                "legacy:replace_store(dest_path, buffer, offset, block_size)",
                but="every block is a separate task",
            ),
        ),
        seam(
            replacement(
                "secondary_tiers.load_blocks",
                f"{_FS}:batch_load_block",
                "block_files:replace_load(paths, view, offsets, block_size, use_o_direct)",
                "a damaged file of full length produces wrong tokens",
                *_UNVERIFIED,
                since="0.27",
                only_with=WITH_TIERS,
            ),
            Row(
                "secondary_tiers.load_block",
                f"{_FS}:load_block",
                "legacy:replace_load(source_path, view, offset, block_size)",
                but="every block is a separate task",
            ),
        ),
        seam(
            Row(
                "secondary_tiers.tier_class",
                f"{_KV_OFFLOAD}.tiering.factory:SecondaryTierFactory.get_tier_class",
                "fs:around_tier_class(tier_config)",
                "an unresponsive disk blocks requests, and two lookup results for one block "
                "end the engine",
                "vllm-project/vllm#45765 (timeout of lookups), vllm-project/vllm#49328",
                "vLLM has a timeout for tiers",
                since="0.25",
                only_with=WITH_TIERS,
            ),
            replacement(
                "secondary_tiers.tier_class_itself",
                f"{_FS}:FileSystemTierManager",
                "fs:replace_tier_class()",
                but="the class of a tier is not looked up",
            ),
        ),
        Row(
            "secondary_tiers.lookup",
            f"{_MANAGER}.lookup",
            "promotion:around_lookup(self, key, req_context)",
            "a request waits indefinitely for blocks that an unresponsive tier promotes",
            "vllm-project/vllm#45765 (timeout of lookups)",
            "vLLM has a timeout for tiers",
            only_with=WITH_TIERS,
        ),
        seam(
            Row(
                "secondary_tiers.promotion",
                f"{_MANAGER}._initiate_promotion",
                "promotion:around_promotion(self, tier_idx, key, req_context)",
                "a prompt larger than the primary tier promotes blocks that evict each other, "
                "and never runs",
                "vllm-project/vllm#49902, vllm-project/vllm#50014",
                "vLLM keeps a promoted block until its request has loaded it",
                since="0.28",
                only_with=WITH_TIERS,
            ),
            Row(
                "secondary_tiers.promotion_of_tier",
                wrapper="promotion:around_promotion(self, tier, key, req_context)",
                but="and an unreadable block is looked up again in every step",
                upstream="vllm-project/vllm#49176, vllm-project/vllm#49902",
            ),
        ),
        Row(
            "secondary_tiers.promoted_blocks",
            f"{_MANAGER}._flush_pending_promotions",
            "legacy:split_promotions",
            "one block that cannot be read fails all blocks of its promotion job",
            "vllm-project/vllm#49176 (the blocks before it are kept)",
            only_with=WITH_TIERS,
            later=("0.28", "the blocks read before a failure are kept (vllm-project/vllm#49176)"),
        ),
        Row(
            "secondary_tiers.last_blocks",
            f"{_MANAGER}.prepare_store",
            "legacy:around_prepare_store(self, keys, req_context)",
            "a request's last blocks are stored after its state was dropped: engine ends",
            "vllm-project/vllm#49635, vllm-project/vllm#49671",
            since="0.25",
            only_with=WITH_TIERS,
            earlier="the manager keeps no state per request",
            later=("0.27", "fixed by vllm-project/vllm#49671"),
        ),
        Row(
            "secondary_tiers.matched_tokens",
            f"{_SCHEDULER}.get_num_new_matched_tokens",
            "admission:around_matched_tokens(self, request, num_computed_tokens)",
            "a request that waited for a tier, and others that hold the memory it needs, deadlock",
            *_ADMITTED,
        ),
        Row(
            "secondary_tiers.disk_hits",
            f"{_SCHEDULER}.update_state_after_alloc",
            "fixes:count_disk_hits(self, request, blocks, num_external_tokens)",
            "a hit does not say whether its block came from a disk",
            "vllm-project/vllm, CacheHitSource in 0.32",
            only_with=WITH_TIERS,
            later=("0.32", "vLLM's stats name the source of every hit"),
        ),
        Row(
            "secondary_tiers.build",
            f"{_SCHEDULER}.build_connector_meta",
            "admission:around_build(self, scheduler_output)",
            "deferred requests are recorded per step, and the record ends with the step",
            *_ADMITTED,
        ),
        Row(
            "secondary_tiers.reset",
            f"{_SCHEDULER}.build_connector_meta",
            "fixes:hold_promotions(self, scheduler_output)",
            "after a reset a tier promotes into a chunk that an older copy still writes",
            "vllm-project/vllm#44541 (waits for the tiers' transfers alone)",
            only_with=WITH_TIERS,
            later=("0.33", "vLLM promotes nothing until the workers have reported such copies"),
        ),
    ),
)
