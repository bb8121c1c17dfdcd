"""kvcached 0.1.6 on vLLM releases that it does not support.

kvcached supports Model Runner V1 up to vLLM 0.28 and Model Runner V2 up to 0.30, and rejects
later releases in five places. Each of these is a row, and so is each place where vLLM has
changed since: overriding one check alone results in an engine with kvcached's scheduler and
vLLM's own memory.

Two features, because kvcached checks the version before it patches vLLM, and kvpatch patches
vLLM after that.
"""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Patch, seam
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import COORDINATOR, V1_RUNNER

_PATCHES = "kvcached.integration.vllm.patches"
_UPSTREAM = "ovg-project/kvcached, VLLM_MRV2_RANGE in 0.1.6"
_UNTIL = "kvcached supports vLLM 0.31 and later itself"
_V1_UNTIL = "kvcached supports Model Runner V1 of vLLM 0.29 and later"
_ITSELF = Gap(FLOOR, "0.31", "kvcached 0.1.6 patches these releases itself")
_V1_ITSELF = Gap(FLOOR, "0.29", "kvcached 0.1.6 supports Model Runner V1 of these releases")

VERSION_OVERRIDE = Feature(
    name="kvcached-version-override",
    summary="kvcached applies its patches for vLLM 0.30 to later releases, and its patches of "
    "EngineCore to Model Runner V1 from 0.29 on",
    since=FLOOR,
    before_kvcached=True,
    rules="kvpatch.patches.kvcached_compat.rules:RULES",
    seams=(
        seam(
            Patch(
                id="told.runner_v2",
                target="kvcached.integration.patch_base:PatchManager.register_patches_with_versions",
                why="kvcached's V2 adapter is for vLLM <0.31, so the workers bypass its memory",
                upstream=_UPSTREAM,
                until=_UNTIL,
                wrapper="kvpatch.patches.kvcached_compat.adapters:register_for_later_releases",
                parameters=("self", "patches"),
                since="0.31",
            ),
            _ITSELF,
        ),
        seam(
            Patch(
                id="told.block_pool",
                target=f"{_PATCHES}:ElasticBlockPoolPatch.inject_elastic_block_pool",
                why="the block pool lacks vLLM's hash maps, and the first lookup fails",
                upstream="ovg-project/kvcached, inject_elastic_block_pool in 0.1.6",
                until=_UNTIL,
                wrapper="kvpatch.patches.kvcached_compat.adapters:as_on_0_30",
                parameters=("self", "block_pool_mod"),
                since="0.31",
            ),
            _ITSELF,
        ),
        seam(
            Patch(
                id="told.coordinator",
                target=f"{_PATCHES}:KVCacheCoordinatorPatch.patch_coordinator",
                why="the scheduler sizes blocks by the old layouts, unlike the workers",
                upstream=_UPSTREAM,
                until=_UNTIL,
                wrapper="kvpatch.patches.kvcached_compat.adapters:as_on_0_30",
                parameters=("self", "kvcoord_mod"),
                since="0.31",
            ),
            _ITSELF,
        ),
        seam(
            Patch(
                id="told.allocate_slots",
                target=f"{_PATCHES}:KVCacheManagerAllocateSlotsPatch.patch_allocate_slots",
                why="a partially failed allocation is not rolled back",
                upstream="ovg-project/kvcached, patch_allocate_slots in 0.1.6",
                until=_UNTIL,
                wrapper="kvpatch.patches.kvcached_compat.adapters:as_on_0_30",
                parameters=("self", "kvcache_manager_mod"),
                since="0.31",
            ),
            _ITSELF,
        ),
        seam(
            Patch(
                id="told.engine_core",
                target=f"{_PATCHES}:EngineCorePatch.patch_engine_init",
                why="EngineCore rejects vLLM 0.31 and later, and Runner V1 from 0.29 on",
                upstream=_UPSTREAM,
                until=f"{_UNTIL}, and Runner V1",
                wrapper="kvpatch.patches.kvcached_compat.adapters:as_on_0_28",
                parameters=("self", "engine_mod"),
                since="0.29",
            ),
            _V1_ITSELF,
        ),
    ),
)

ADAPTERS = Feature(
    name="kvcached-adapters",
    summary="kvcached's patches are adapted to changes in vLLM 0.29 and later; before 0.28 a model "
    "runs on Model Runner V1 unless it needs V2",
    since=FLOOR,
    seams=(
        seam(
            Gap("0.16", "0.22", "V1 is vLLM's default for every model"),
            Patch(
                id="adapted.v1_by_default",
                target="vllm.config.vllm:VllmConfig._is_default_v2_model_runner_model",
                why="on a GPU vLLM takes Runner V2, from 0.25 on for every dense model, and "
                "kvcached has no adapter for it",
                upstream="ovg-project/kvcached, VLLM_028_MRV2_RANGE in 0.1.6",
                until="the supported releases start at 0.28",
                wrapper="kvpatch.patches.kvcached_compat.runner_choice:v1_by_default",
                parameters=("self",),
                since="0.22",
                before="0.28",
            ),
            Gap("0.28", None, "kvcached has an adapter for V2, from 0.31 on through told.*"),
        ),
        seam(
            Patch(
                id="adapted.pool_attributes",
                target=f"{COORDINATOR}._setup_kvcached_coordinator",
                why="vLLM's methods read attributes that kvcached's block pool does not have",
                upstream="ovg-project/kvcached, native_block_pool.py in 0.1.6",
                until=_UNTIL,
                wrapper="kvpatch.patches.kvcached_compat.adapters:carry_pool_attributes",
                parameters=("self",),
                since="0.30",
            ),
            Gap("0.16", "0.30", "kvcached copies every attribute that vLLM reads"),
        ),
        seam(
            Patch(
                id="adapted.request_memory",
                target="vllm.v1.worker.gpu_worker:request_memory",
                why="kvcached's takes two arguments and vLLM passes three: every GPU worker fails",
                upstream="ovg-project/kvcached, patch_worker_init_device in 0.1.6",
                until=_UNTIL,
                wrapper="kvpatch.patches.kvcached_compat.adapters:request_memory",
                parameters=("init_snapshot", "cache_config"),
                since="0.32",
            ),
            Gap("0.16", "0.32", "vLLM passes two arguments, as kvcached expects"),
        ),
        seam(
            Patch(
                id="adapted.profiling",
                target="vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
                why="kvcached's profile run omits what vLLM sets up around its own",
                upstream="ovg-project/kvcached, patch_worker_determine_available_memory in 0.1.6",
                until=_UNTIL,
                wrapper="kvpatch.patches.kvcached_compat.adapters:profile_as_vllm",
                parameters=("self",),
                since="0.31",
            ),
            Gap("0.16", "0.31", "kvcached's profile run is equivalent to vLLM's"),
        ),
        seam(
            Gap("0.16", "0.28", "kvcached patches these releases without it"),
            Gap("0.28", "0.31", "kvcached 0.1.6 patches these releases itself"),
            Patch(
                id="adapted.partial_tail",
                target="vllm.v1.core.single_type_kv_cache_manager:"
                "MambaManager._cache_partial_tail_block",
                why="the state of a running request is named by a boundary that it has passed",
                upstream="ovg-project/kvcached, MambaPartialTailPatch is for vLLM <0.31 in 0.1.6",
                until=_UNTIL,
                wrapper="kvpatch.patches.kvcached_compat.partial_tails:unless_it_has_passed",
                parameters=("self", "request", "num_tokens"),
                since="0.31",
            ),
        ),
        seam(
            Patch(
                id="adapted.v1_worker",
                target=f"{V1_RUNNER}.__init__",
                why="kvcached is not set up in the workers of Runner V1",
                upstream="ovg-project/kvcached, GPUModelRunnerPatch is for vLLM <0.29 in 0.1.6",
                until=_V1_UNTIL,
                wrapper="kvpatch.patches.kvcached_compat.runner_v1:set_up_worker",
                parameters=("self", "vllm_config", "device"),
                since="0.29",
            ),
            _V1_ITSELF,
        ),
        seam(
            Patch(
                id="adapted.v1_profiling",
                target=f"{V1_RUNNER}.initialize_kv_cache",
                why="the temporary KV cache of graph profiling must not be on kvcached's memory",
                upstream="ovg-project/kvcached, ModelRunnerV2Patch in 0.1.6 (does it for V2)",
                until=_V1_UNTIL,
                wrapper="kvpatch.patches.kvcached_compat.runner_v1:mark_lasting_allocation",
                parameters=("self", "kv_cache_config", "is_profiling"),
                since="0.29",
            ),
            _V1_ITSELF,
        ),
        seam(
            Patch(
                id="adapted.v1_allocation",
                target="vllm.v1.worker.gpu_model_runner:allocate_kv_cache",
                why="Runner V1 allocates one torch.zeros that bypasses kvcached's memory",
                upstream="ovg-project/kvcached, ModelRunnerV2Patch in 0.1.6 (does it for V2)",
                until=_V1_UNTIL,
                wrapper="kvpatch.patches.kvcached_compat.runner_v1:allocate",
                parameters=("kv_cache_config", "device", "layout"),
                since="0.29",
            ),
            _V1_ITSELF,
        ),
    ),
)
