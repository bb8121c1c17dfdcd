"""vLLM's secondary tiers (TieringOffloadingSpec) on kvcached's memory and on faulty disks."""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Kind, Patch, seam
from kvpatch.upstream.targets import ENGINE_CORE, OFFLOADING

_KV_OFFLOAD = "vllm.v1.kv_offload"
_FS = f"{_KV_OFFLOAD}.tiering.fs.manager"
_SCHEDULER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_MANAGER = f"{_KV_OFFLOAD}.tiering.manager:TieringOffloadingManager"
_RANDOM_ID = Gap("0.24", "0.26", "vLLM names the memory after a random id")

FEATURE = Feature(
    name="tiers",
    summary="the fs tier returns exactly the bytes stored, and is shared only between engines "
    "with the same KV layout and weights",
    since="0.24",
    optional=True,
    rules="kvpatch.patches.secondary_tiers.rules:RULES",
    seams=(
        seam(
            Patch(
                id="tiers.shared_memory",
                target=f"{ENGINE_CORE}.__init__",
                why="two engines with one engine_id share one primary tier, and load wrong KV",
                upstream="none: vLLM opens existing memory of that name",
                until="vLLM refuses memory that another engine created",
                wrapper="kvpatch.patches.secondary_tiers.shared_memory:around_engine_core",
                parameters=("vllm_config",),
                since="0.26",
            ),
            _RANDOM_ID,
        ),
        seam(
            Patch(
                id="tiers.shared_region",
                target=f"{_KV_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion.__init__",
                why="memory that another user made under this name is joined, and read by him",
                upstream="none: vLLM opens existing memory of that name",
                until="vLLM checks the owner of the memory that it opens",
                wrapper="kvpatch.patches.secondary_tiers.shared_memory:around_region",
                parameters=("self", "engine_id"),
                since="0.26",
            ),
            _RANDOM_ID,
        ),
        Patch(
            id="tiers.describe",
            target=f"{ENGINE_CORE}._initialize_kv_caches",
            why="the block layout is known only in the workers, and tiers run elsewhere",
            upstream="none: there is no hook between workers and tiers",
            until="vLLM names files after the layout of their content",
            wrapper="kvpatch.patches.secondary_tiers.fingerprint:around_kv_caches",
            parameters=("self", "vllm_config"),
            since="0.24",
        ),
        Patch(
            id="tiers.file_mapper",
            target=f"{_KV_OFFLOAD}.file_mapper:FileMapper.from_offloading_spec",
            why="engines with different layouts or weights share files and load wrong KV",
            upstream="vllm-project/vllm#48408 (the layout of stored blocks, by layer)",
            until="vLLM names files after the layout of their content",
            wrapper="kvpatch.patches.secondary_tiers.fingerprint:around_file_mapper",
            parameters=("root_dir", "offloading_spec", "parallel_agnostic"),
            since="0.24",
        ),
        seam(
            Patch(
                id="tiers.store_blocks",
                target=f"{_FS}:batch_store_block",
                why="files have no checksum, and are readable by every user",
                upstream="vllm-project/vllm#49176 (damaged files; those of full length pass)",
                until="vLLM's fs tier verifies what it reads",
                wrapper="kvpatch.patches.secondary_tiers.block_files:replace_store",
                parameters=("paths", "view", "offsets", "block_size", "use_o_direct"),
                since="0.27",
                kind=Kind.REPLACE,
            ),
            Patch(
                id="tiers.store_block",
                target=f"{_FS}:store_block",
                why="as tiers.store_blocks; every block is a separate task",
                upstream="vllm-project/vllm#49176 (damaged files; those of full length pass)",
                until="vLLM 0.27",
                wrapper="kvpatch.patches.secondary_tiers.legacy:replace_store",
                parameters=("dest_path", "buffer", "offset", "block_size"),
                since="0.24",
                before="0.27",
                kind=Kind.REPLACE,
            ),
        ),
        seam(
            Patch(
                id="tiers.load_blocks",
                target=f"{_FS}:batch_load_block",
                why="a damaged file of full length produces wrong tokens",
                upstream="vllm-project/vllm#49176 (damaged files; those of full length pass)",
                until="vLLM's fs tier verifies what it reads",
                wrapper="kvpatch.patches.secondary_tiers.block_files:replace_load",
                parameters=("paths", "view", "offsets", "block_size", "use_o_direct"),
                since="0.27",
                kind=Kind.REPLACE,
            ),
            Patch(
                id="tiers.load_block",
                target=f"{_FS}:load_block",
                why="as tiers.load_blocks; every block is a separate task",
                upstream="vllm-project/vllm#49176 (damaged files; those of full length pass)",
                until="vLLM 0.27",
                wrapper="kvpatch.patches.secondary_tiers.legacy:replace_load",
                parameters=("source_path", "view", "offset", "block_size"),
                since="0.24",
                before="0.27",
                kind=Kind.REPLACE,
            ),
        ),
        seam(
            Patch(
                id="tiers.tier_class",
                target=f"{_KV_OFFLOAD}.tiering.factory:SecondaryTierFactory.get_tier_class",
                why="an unresponsive disk blocks requests, and two lookup results for one block "
                "end the engine",
                upstream="vllm-project/vllm#45765 (timeout of lookups), vllm-project/vllm#49328",
                until="vLLM has a timeout for tiers",
                wrapper="kvpatch.patches.secondary_tiers.fs:around_tier_class",
                parameters=("tier_config",),
                since="0.25",
            ),
            Patch(
                id="tiers.tier_class_itself",
                target=f"{_FS}:FileSystemTierManager",
                why="as tiers.tier_class; the class of a tier is not looked up",
                upstream="vllm-project/vllm#45765 (timeout of lookups), vllm-project/vllm#49328",
                until="vLLM 0.25",
                wrapper="kvpatch.patches.secondary_tiers.fs:replace_tier_class",
                parameters=(),
                since="0.24",
                before="0.25",
                kind=Kind.REPLACE,
            ),
        ),
        Patch(
            id="tiers.lookup",
            target=f"{_MANAGER}.lookup",
            why="a request waits indefinitely for blocks that an unresponsive tier promotes",
            upstream="vllm-project/vllm#45765 (timeout of lookups)",
            until="vLLM has a timeout for tiers",
            wrapper="kvpatch.patches.secondary_tiers.promotion:around_lookup",
            parameters=("self", "key", "req_context"),
            since="0.24",
        ),
        seam(
            Patch(
                id="tiers.promotion",
                target=f"{_MANAGER}._initiate_promotion",
                why="a prompt larger than the primary tier promotes blocks that evict each other, "
                "and never runs",
                upstream="vllm-project/vllm#49902, vllm-project/vllm#50014",
                until="vLLM keeps a promoted block until its request has loaded it",
                wrapper="kvpatch.patches.secondary_tiers.promotion:around_promotion",
                parameters=("self", "tier_idx", "key", "req_context"),
                since="0.28",
            ),
            Patch(
                id="tiers.promotion_of_tier",
                target=f"{_MANAGER}._initiate_promotion",
                why="as tiers.promotion; and an unreadable block is looked up again in every step",
                upstream="vllm-project/vllm#49176, vllm-project/vllm#49902",
                until="vLLM 0.28",
                wrapper="kvpatch.patches.secondary_tiers.promotion:around_promotion",
                parameters=("self", "tier", "key", "req_context"),
                since="0.24",
                before="0.28",
            ),
        ),
        seam(
            Patch(
                id="tiers.promoted_blocks",
                target=f"{_MANAGER}._flush_pending_promotions",
                why="one block that cannot be read fails all blocks of its promotion job",
                upstream="vllm-project/vllm#49176 (the blocks before it are kept)",
                until="vLLM 0.28",
                wrapper="kvpatch.patches.secondary_tiers.legacy:split_promotions",
                parameters=("self",),
                since="0.24",
                before="0.28",
            ),
            Gap(
                "0.28",
                None,
                "the blocks read before a failure are kept (vllm-project/vllm#49176)",
            ),
        ),
        seam(
            Patch(
                id="tiers.last_blocks",
                target=f"{_MANAGER}.prepare_store",
                why="a request's last blocks are stored after its state was dropped: engine ends",
                upstream="vllm-project/vllm#49635, vllm-project/vllm#49671",
                until="vLLM 0.27",
                wrapper="kvpatch.patches.secondary_tiers.legacy:around_prepare_store",
                parameters=("self", "keys", "req_context"),
                since="0.25",
                before="0.27",
            ),
            Gap("0.24", "0.25", "the manager keeps no state per request"),
            Gap("0.27", None, "fixed by vllm-project/vllm#49671"),
        ),
        Patch(
            id="tiers.matched_tokens",
            target=f"{_SCHEDULER}.get_num_new_matched_tokens",
            why="a request that waited for a tier, and others that hold the memory it needs, "
            "deadlock",
            upstream="vllm-project/vllm#57841, vllm-project/vllm#45388",
            until="vLLM admits no load behind a waiting request",
            wrapper="kvpatch.patches.secondary_tiers.admission:around_matched_tokens",
            parameters=("self", "request", "num_computed_tokens"),
            since="0.24",
        ),
        Patch(
            id="tiers.build",
            target=f"{_SCHEDULER}.build_connector_meta",
            why="deferred requests are recorded per step, and the record ends with the step",
            upstream="vllm-project/vllm#57841, vllm-project/vllm#45388",
            until="vLLM admits no load behind a waiting request",
            wrapper="kvpatch.patches.secondary_tiers.admission:around_build",
            parameters=("self", "scheduler_output"),
            since="0.24",
        ),
    ),
)
