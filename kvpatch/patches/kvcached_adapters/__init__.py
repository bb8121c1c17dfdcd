"""kvcached 0.1.6 on vLLM releases that it does not support: where vLLM has changed since."""

from __future__ import annotations

from kvpatch.rows import Row, feature, gap, seam
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import COORDINATOR, V1_RUNNER

_UNTIL = "kvcached supports vLLM 0.31 and later itself"
_V1_ITSELF = "kvcached 0.1.6 supports Model Runner V1 of these releases"
_V1_UNTIL = "kvcached supports Model Runner V1 of vLLM 0.29 and later"

FEATURE = feature(
    __name__,
    summary="kvcached's patches are adapted to changes in vLLM 0.29 and later; before 0.28 a "
    "model runs on Model Runner V1 unless it needs V2",
    since=FLOOR,
    until=_UNTIL,
    seams=(
        Row(
            "kvcached_adapters.v1_by_default",
            "vllm.config.vllm:VllmConfig._is_default_v2_model_runner_model",
            "runner_choice:v1_by_default",
            "on a GPU vLLM takes Runner V2, from 0.25 on for every dense model, and "
            "kvcached has no adapter for it",
            "ovg-project/kvcached, VLLM_028_MRV2_RANGE in 0.1.6",
            "the supported releases start at 0.28",
            since="0.22",
            earlier="V1 is vLLM's default for every model",
            later=("0.28", "kvcached has an adapter for V2, from 0.31 on by kvcached_version"),
        ),
        Row(
            "kvcached_adapters.pool_attributes",
            f"{COORDINATOR}._setup_kvcached_coordinator",
            "adapters:carry_pool_attributes",
            "vLLM's methods read attributes that kvcached's block pool does not have",
            "ovg-project/kvcached, native_block_pool.py in 0.1.6",
            since="0.30",
            earlier="kvcached copies every attribute that vLLM reads",
        ),
        Row(
            "kvcached_adapters.request_memory",
            "vllm.v1.worker.gpu_worker:request_memory",
            "adapters:request_memory(init_snapshot, cache_config)",
            "kvcached's takes two arguments and vLLM passes three: every GPU worker fails",
            "ovg-project/kvcached, patch_worker_init_device in 0.1.6",
            since="0.32",
            earlier="vLLM passes two arguments, as kvcached expects",
        ),
        Row(
            "kvcached_adapters.profiling",
            "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
            "adapters:profile_as_vllm",
            "kvcached's profile run omits what vLLM sets up around its own",
            "ovg-project/kvcached, patch_worker_determine_available_memory in 0.1.6",
            since="0.31",
            earlier="kvcached's profile run is equivalent to vLLM's",
        ),
        seam(
            Row(
                "kvcached_adapters.partial_tail",
                "vllm.v1.core.single_type_kv_cache_manager:MambaManager._cache_partial_tail_block",
                "partial_tails:unless_it_has_passed(self, request, num_tokens)",
                "the state of a running request is named by a boundary that it has passed",
                "ovg-project/kvcached, MambaPartialTailPatch is for vLLM <0.31 in 0.1.6",
                since="0.31",
            ),
            gap("kvcached 0.1.6 patches these releases itself", since="0.28"),
            gap("kvcached patches these releases without it"),
        ),
        Row(
            "kvcached_adapters.v1_worker",
            f"{V1_RUNNER}.__init__",
            "runner_v1:set_up_worker(self, vllm_config, device)",
            "kvcached is not set up in the workers of Runner V1",
            "ovg-project/kvcached, GPUModelRunnerPatch is for vLLM <0.29 in 0.1.6",
            _V1_UNTIL,
            since="0.29",
            earlier=_V1_ITSELF,
        ),
        Row(
            "kvcached_adapters.v1_profiling",
            f"{V1_RUNNER}.initialize_kv_cache",
            "runner_v1:mark_lasting_allocation(self, kv_cache_config, is_profiling)",
            "the temporary KV cache of graph profiling must not be on kvcached's memory",
            "ovg-project/kvcached, ModelRunnerV2Patch in 0.1.6 (does it for V2)",
            _V1_UNTIL,
            since="0.29",
            earlier=_V1_ITSELF,
        ),
        Row(
            "kvcached_adapters.v1_allocation",
            "vllm.v1.worker.gpu_model_runner:allocate_kv_cache",
            "runner_v1:allocate(kv_cache_config, device, layout)",
            "Runner V1 allocates one torch.zeros that bypasses kvcached's memory",
            "ovg-project/kvcached, ModelRunnerV2Patch in 0.1.6 (does it for V2)",
            _V1_UNTIL,
            since="0.29",
            earlier=_V1_ITSELF,
        ),
    ),
)
