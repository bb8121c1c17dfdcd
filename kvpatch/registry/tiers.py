"""Rows for the tiers behind the CPU tier: vLLM's TieringOffloadingSpec."""

from __future__ import annotations

from kvpatch.patch import Feature, Kind, Patch
from kvpatch.registry.releases import KVCACHED_RANGE, TIERS_RANGE
from kvpatch.registry.targets import ENGINE_CORE, OFFLOADING

_KV_OFFLOAD = "vllm.v1.kv_offload"
_FS = f"{_KV_OFFLOAD}.tiering.fs.manager"
_PLANNER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_MANAGER = f"{_KV_OFFLOAD}.tiering.manager:TieringOffloadingManager"

FEATURE = Feature(
    name="tiers",
    summary="the fs tier gives back the bytes it was given, to engines that mean the same by them",
    vllm=TIERS_RANGE,
    optional=True,
    kvcached=KVCACHED_RANGE,
    patches=(
        Patch(
            id="tiers.shared_memory",
            target=f"{ENGINE_CORE}.__init__",
            why="two engines with one engine_id share one CPU tier and give each other's KV",
            upstream="none: vLLM opens the memory it finds under the name",
            until="vLLM refuses memory that another engine created",
            wrapper="kvpatch.tiers.shared_memory:around_engine_core",
            parameters=("vllm_config",),
            vllm=">=0.28,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="tiers.describe",
            target=f"{ENGINE_CORE}._initialize_kv_caches",
            why="only the workers know how a block lies in memory, and tiers live elsewhere",
            upstream="none: there is no hook between workers and tiers",
            until="vLLM names files by the layout of what they hold",
            wrapper="kvpatch.tiers.identity:around_kv_caches",
            parameters=("self", "vllm_config"),
            vllm=">=0.28,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="tiers.file_mapper",
            target=f"{_KV_OFFLOAD}.file_mapper:FileMapper.from_offloading_spec",
            why="engines with other layouts or weights share files and load permuted KV",
            upstream="vllm-project/vllm#48408 (the layout of what is kept, by layer)",
            until="vLLM names files by the layout of what they hold",
            wrapper="kvpatch.tiers.identity:around_file_mapper",
            parameters=("root_dir", "offloading_spec", "parallel_agnostic"),
            vllm=">=0.28,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="tiers.store_blocks",
            target=f"{_FS}:batch_store_block",
            why="files have no checksum and every user can read them",
            upstream="vllm-project/vllm#49176 (damaged files; those of full length pass)",
            until="vLLM's fs tier checks what it reads",
            wrapper="kvpatch.tiers.files:replace_store",
            parameters=("paths", "view", "offsets", "block_size", "use_o_direct"),
            vllm=">=0.28,<0.34",
            kvcached="==0.1.6",
            kind=Kind.REPLACE,
        ),
        Patch(
            id="tiers.load_blocks",
            target=f"{_FS}:batch_load_block",
            why="a damaged file of full length gives wrong tokens",
            upstream="vllm-project/vllm#49176 (damaged files; those of full length pass)",
            until="vLLM's fs tier checks what it reads",
            wrapper="kvpatch.tiers.files:replace_load",
            parameters=("paths", "view", "offsets", "block_size", "use_o_direct"),
            vllm=">=0.28,<0.34",
            kvcached="==0.1.6",
            kind=Kind.REPLACE,
        ),
        Patch(
            id="tiers.tier_class",
            target=f"{_KV_OFFLOAD}.tiering.factory:SecondaryTierFactory.get_tier_class",
            why="a disk that hangs keeps requests waiting, and two answers about one block "
            "end the engine",
            upstream="vllm-project/vllm#45765 (a limit to lookups), vllm-project/vllm#49328",
            until="vLLM gives a tier's answers a limit",
            wrapper="kvpatch.tiers.fs:around_tier_class",
            parameters=("tier_config",),
            vllm=">=0.28,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="tiers.lookup",
            target=f"{_MANAGER}.lookup",
            why="a request waits for ever for blocks that a hanging tier began to bring up",
            upstream="vllm-project/vllm#45765 (a limit to lookups)",
            until="vLLM gives a tier's answers a limit",
            wrapper="kvpatch.tiers.promotion:around_lookup",
            parameters=("self", "key", "req_context"),
            vllm=">=0.28,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="tiers.promotion",
            target=f"{_MANAGER}._initiate_promotion",
            why="a prompt larger than the CPU tier brings its own blocks up in turn for ever",
            upstream="vllm-project/vllm#49902, vllm-project/vllm#50014",
            until="vLLM keeps a promoted block until its request has read it",
            wrapper="kvpatch.tiers.promotion:around_promotion",
            parameters=("self", "tier_idx", "key", "req_context"),
            vllm=">=0.28,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="tiers.matched_tokens",
            target=f"{_PLANNER}.get_num_new_matched_tokens",
            why="a request that had to wait for a tier's answer, and others that hold the memory "
            "it needs, wait for each other for ever",
            upstream="vllm-project/vllm#57841, vllm-project/vllm#45388",
            until="vLLM admits no load behind a request that waits",
            wrapper="kvpatch.tiers.admission:around_matched_tokens",
            parameters=("self", "request", "num_computed_tokens"),
            vllm=">=0.28,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="tiers.build",
            target=f"{_PLANNER}.build_connector_meta",
            why="which requests waited is known only within one step",
            upstream="vllm-project/vllm#57841, vllm-project/vllm#45388",
            until="vLLM admits no load behind a request that waits",
            wrapper="kvpatch.tiers.admission:around_build",
            parameters=("self", "scheduler_output"),
            vllm=">=0.28,<0.34",
            kvcached="==0.1.6",
        ),
    ),
)
