"""Rows that make kvcached 0.1.6 whole on vLLM releases it was not written for.

kvcached adapts Model Runner V1 to 0.28 and Model Runner V2 to 0.30, and says no to the
rest in five places. Each place that says no is a row, and so is each place behind it
where vLLM has changed since: opening one guard alone gives an engine with kvcached's
scheduler and vLLM's own memory.

Two features, because kvcached must be told before it patches vLLM, and vLLM can be
patched only after.
"""

from __future__ import annotations

from kvpatch.patch import Feature, Patch
from kvpatch.registry.releases import KVCACHED_RANGE, VLLM_RANGE
from kvpatch.registry.targets import V1_RUNNER

_PATCHES = "kvcached.integration.vllm.patches"
_UPSTREAM = "ovg-project/kvcached, VLLM_MRV2_RANGE in 0.1.6"
_UNTIL = "kvcached adapts vLLM 0.31 and later itself"
_V1_UNTIL = "kvcached adapts Model Runner V1 of vLLM 0.29 and later"

TOLD = Feature(
    name="kvcached-told",
    summary="kvcached patches vLLM 0.31 and 0.32 as it does 0.30, and Runner V1 from 0.29 on",
    vllm=VLLM_RANGE,
    kvcached=KVCACHED_RANGE,
    before_kvcached=True,
    patches=(
        Patch(
            id="told.runner_v2",
            target="kvcached.integration.patch_base:PatchManager.register_patches_with_versions",
            why="the workers allocate vLLM's own memory: the V2 adapter is for vLLM <0.31",
            upstream=_UPSTREAM,
            until=_UNTIL,
            wrapper="kvpatch.releases:register_for_later_releases",
            parameters=("self", "patches"),
            vllm=">=0.31,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="told.block_pool",
            target=f"{_PATCHES}:ElasticBlockPoolPatch.inject_elastic_block_pool",
            why="the block pool lacks vLLM's hash maps, and the first lookup dies",
            upstream="ovg-project/kvcached, inject_elastic_block_pool in 0.1.6",
            until=_UNTIL,
            wrapper="kvpatch.releases:as_on_0_30",
            parameters=("self", "block_pool_mod"),
            vllm=">=0.31,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="told.coordinator",
            target=f"{_PATCHES}:KVCacheCoordinatorPatch.patch_coordinator",
            why="the scheduler's blocks have the size of the old layouts, not the workers'",
            upstream=_UPSTREAM,
            until=_UNTIL,
            wrapper="kvpatch.releases:as_on_0_30",
            parameters=("self", "kvcoord_mod"),
            vllm=">=0.31,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="told.allocate_slots",
            target=f"{_PATCHES}:KVCacheManagerAllocateSlotsPatch.patch_allocate_slots",
            why="an allocation that a neighbour beat to the last page is left half made",
            upstream="ovg-project/kvcached, patch_allocate_slots in 0.1.6",
            until=_UNTIL,
            wrapper="kvpatch.releases:as_on_0_30",
            parameters=("self", "kvcache_manager_mod"),
            vllm=">=0.31,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="told.engine_core",
            target=f"{_PATCHES}:EngineCorePatch.patch_engine_init",
            why="EngineCore refuses vLLM 0.31 and later, and Runner V1 from 0.29 on",
            upstream=_UPSTREAM,
            until=f"{_UNTIL}, and Runner V1",
            wrapper="kvpatch.releases:as_on_0_28",
            parameters=("self", "engine_mod"),
            vllm=">=0.29,<0.34",
            kvcached="==0.1.6",
        ),
    ),
)

ADAPTED = Feature(
    name="kvcached-adapted",
    summary="what vLLM 0.29 to 0.32 changed under kvcached's patches",
    vllm=VLLM_RANGE,
    kvcached=KVCACHED_RANGE,
    patches=(
        Patch(
            id="adapted.pool_attributes",
            target="vllm.v1.core.kv_cache_coordinator:"
            "KVCacheCoordinator._setup_kvcached_coordinator",
            why="vLLM's methods read attributes that kvcached's block pool has not heard of",
            upstream="ovg-project/kvcached, native_block_pool.py in 0.1.6",
            until=_UNTIL,
            wrapper="kvpatch.releases:carry_pool_attributes",
            parameters=("self",),
            vllm=">=0.30,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="adapted.request_memory",
            target="vllm.v1.worker.gpu_worker:request_memory",
            why="kvcached's takes two arguments and vLLM gives three: every GPU worker dies",
            upstream="ovg-project/kvcached, patch_worker_init_device in 0.1.6",
            until=_UNTIL,
            wrapper="kvpatch.releases:request_memory",
            parameters=("init_snapshot", "cache_config"),
            vllm=">=0.32,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="adapted.profiling",
            target="vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
            why="kvcached's profile run leaves out what vLLM does around its own",
            upstream="ovg-project/kvcached, patch_worker_determine_available_memory in 0.1.6",
            until=_UNTIL,
            wrapper="kvpatch.releases:profile_as_vllm",
            parameters=("self",),
            vllm=">=0.31,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="adapted.v1_worker",
            target=f"{V1_RUNNER}.__init__",
            why="kvcached is not set up in the workers of Runner V1",
            upstream="ovg-project/kvcached, GPUModelRunnerPatch is for vLLM <0.29 in 0.1.6",
            until=_V1_UNTIL,
            wrapper="kvpatch.runner_v1:set_up_worker",
            parameters=("self", "vllm_config", "device"),
            vllm=">=0.29,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="adapted.v1_profiling",
            target=f"{V1_RUNNER}.initialize_kv_cache",
            why="the temporary KV cache of the graph profile must not become kvcached's pool",
            upstream="ovg-project/kvcached, ModelRunnerV2Patch in 0.1.6 (does it for V2)",
            until=_V1_UNTIL,
            wrapper="kvpatch.runner_v1:mark_lasting_allocation",
            parameters=("self", "kv_cache_config", "is_profiling"),
            vllm=">=0.29,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="adapted.v1_allocation",
            target="vllm.v1.worker.gpu_model_runner:allocate_kv_cache",
            why="Runner V1 allocates one torch.zeros that bypasses kvcached's memory",
            upstream="ovg-project/kvcached, ModelRunnerV2Patch in 0.1.6 (does it for V2)",
            until=_V1_UNTIL,
            wrapper="kvpatch.runner_v1:allocate",
            parameters=("kv_cache_config", "device", "layout"),
            vllm=">=0.29,<0.34",
            kvcached="==0.1.6",
        ),
    ),
)
