"""kvcached 0.1.6 on vLLM releases that it does not support.

kvcached supports Model Runner V1 up to vLLM 0.28 and Model Runner V2 up to 0.30, and rejects
later releases in five places. Each of these is a row, and so is each place where vLLM has
changed since: overriding one check alone results in an engine with kvcached's scheduler and
vLLM's own memory.

Two features, because kvcached checks the version before it patches vLLM, and kvpatch patches
vLLM after that.
"""

from __future__ import annotations

from kvpatch.rows import Row, feature, gap, seam
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import COORDINATOR, V1_RUNNER

_PATCHES = "kvcached.integration.vllm.patches"
_UPSTREAM = "ovg-project/kvcached, VLLM_MRV2_RANGE in 0.1.6"
_UNTIL = "kvcached supports vLLM 0.31 and later itself"
_ITSELF = gap("kvcached 0.1.6 patches these releases itself")
_V1_ITSELF = gap("kvcached 0.1.6 supports Model Runner V1 of these releases")
_V1_UNTIL = "kvcached supports Model Runner V1 of vLLM 0.29 and later"

VERSION_OVERRIDE = feature(
    __name__,
    name="kvcached-version-override",
    summary="kvcached applies its patches for vLLM 0.30 to later releases, and its patches of "
    "EngineCore to Model Runner V1 from 0.29 on",
    since=FLOOR,
    upstream=_UPSTREAM,
    until=_UNTIL,
    rules="rules:RULES",
    before_kvcached=True,
    seams=(
        seam(
            Row(
                "told.runner_v2",
                "kvcached.integration.patch_base:PatchManager.register_patches_with_versions",
                "adapters:register_for_later_releases(self, patches)",
                "kvcached's V2 adapter is for vLLM <0.31, so the workers bypass its memory",
                since="0.31",
            ),
            _ITSELF,
        ),
        seam(
            Row(
                "told.block_pool",
                f"{_PATCHES}:ElasticBlockPoolPatch.inject_elastic_block_pool",
                "adapters:as_on_0_30(self, block_pool_mod)",
                "the block pool lacks vLLM's hash maps, and the first lookup fails",
                "ovg-project/kvcached, inject_elastic_block_pool in 0.1.6",
                since="0.31",
            ),
            _ITSELF,
        ),
        seam(
            Row(
                "told.coordinator",
                f"{_PATCHES}:KVCacheCoordinatorPatch.patch_coordinator",
                "adapters:as_on_0_30(self, kvcoord_mod)",
                "the scheduler sizes blocks by the old layouts, unlike the workers",
                since="0.31",
            ),
            _ITSELF,
        ),
        seam(
            Row(
                "told.allocate_slots",
                f"{_PATCHES}:KVCacheManagerAllocateSlotsPatch.patch_allocate_slots",
                "adapters:as_on_0_30(self, kvcache_manager_mod)",
                "a partially failed allocation is not rolled back",
                "ovg-project/kvcached, patch_allocate_slots in 0.1.6",
                since="0.31",
            ),
            _ITSELF,
        ),
        seam(
            Row(
                "told.engine_core",
                f"{_PATCHES}:EngineCorePatch.patch_engine_init",
                "adapters:as_on_0_28(self, engine_mod)",
                "EngineCore rejects vLLM 0.31 and later, and Runner V1 from 0.29 on",
                until=f"{_UNTIL}, and Runner V1",
                since="0.29",
            ),
            _V1_ITSELF,
        ),
    ),
)

ADAPTERS = feature(
    __name__,
    name="kvcached-adapters",
    summary="kvcached's patches are adapted to changes in vLLM 0.29 and later; before 0.28 a "
    "model runs on Model Runner V1 unless it needs V2",
    since=FLOOR,
    until=_UNTIL,
    seams=(
        seam(
            gap("kvcached has an adapter for V2, from 0.31 on through told.*", since="0.28"),
            Row(
                "adapted.v1_by_default",
                "vllm.config.vllm:VllmConfig._is_default_v2_model_runner_model",
                "runner_choice:v1_by_default",
                "on a GPU vLLM takes Runner V2, from 0.25 on for every dense model, and "
                "kvcached has no adapter for it",
                "ovg-project/kvcached, VLLM_028_MRV2_RANGE in 0.1.6",
                "the supported releases start at 0.28",
                since="0.22",
            ),
            gap("V1 is vLLM's default for every model"),
        ),
        seam(
            Row(
                "adapted.pool_attributes",
                f"{COORDINATOR}._setup_kvcached_coordinator",
                "adapters:carry_pool_attributes",
                "vLLM's methods read attributes that kvcached's block pool does not have",
                "ovg-project/kvcached, native_block_pool.py in 0.1.6",
                since="0.30",
            ),
            gap("kvcached copies every attribute that vLLM reads"),
        ),
        seam(
            Row(
                "adapted.request_memory",
                "vllm.v1.worker.gpu_worker:request_memory",
                "adapters:request_memory(init_snapshot, cache_config)",
                "kvcached's takes two arguments and vLLM passes three: every GPU worker fails",
                "ovg-project/kvcached, patch_worker_init_device in 0.1.6",
                since="0.32",
            ),
            gap("vLLM passes two arguments, as kvcached expects"),
        ),
        seam(
            Row(
                "adapted.profiling",
                "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
                "adapters:profile_as_vllm",
                "kvcached's profile run omits what vLLM sets up around its own",
                "ovg-project/kvcached, patch_worker_determine_available_memory in 0.1.6",
                since="0.31",
            ),
            gap("kvcached's profile run is equivalent to vLLM's"),
        ),
        seam(
            Row(
                "adapted.partial_tail",
                "vllm.v1.core.single_type_kv_cache_manager:MambaManager._cache_partial_tail_block",
                "partial_tails:unless_it_has_passed(self, request, num_tokens)",
                "the state of a running request is named by a boundary that it has passed",
                "ovg-project/kvcached, MambaPartialTailPatch is for vLLM <0.31 in 0.1.6",
                since="0.31",
            ),
            gap("kvcached 0.1.6 patches these releases itself", since="0.28"),
            gap("kvcached patches these releases without it"),
        ),
        seam(
            Row(
                "adapted.v1_worker",
                f"{V1_RUNNER}.__init__",
                "runner_v1:set_up_worker(self, vllm_config, device)",
                "kvcached is not set up in the workers of Runner V1",
                "ovg-project/kvcached, GPUModelRunnerPatch is for vLLM <0.29 in 0.1.6",
                _V1_UNTIL,
                since="0.29",
            ),
            _V1_ITSELF,
        ),
        seam(
            Row(
                "adapted.v1_profiling",
                f"{V1_RUNNER}.initialize_kv_cache",
                "runner_v1:mark_lasting_allocation(self, kv_cache_config, is_profiling)",
                "the temporary KV cache of graph profiling must not be on kvcached's memory",
                "ovg-project/kvcached, ModelRunnerV2Patch in 0.1.6 (does it for V2)",
                _V1_UNTIL,
                since="0.29",
            ),
            _V1_ITSELF,
        ),
        seam(
            Row(
                "adapted.v1_allocation",
                "vllm.v1.worker.gpu_model_runner:allocate_kv_cache",
                "runner_v1:allocate(kv_cache_config, device, layout)",
                "Runner V1 allocates one torch.zeros that bypasses kvcached's memory",
                "ovg-project/kvcached, ModelRunnerV2Patch in 0.1.6 (does it for V2)",
                _V1_UNTIL,
                since="0.29",
            ),
            _V1_ITSELF,
        ),
    ),
)
