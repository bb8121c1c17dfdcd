"""Rows that keep an engine on kvcached's memory, or stop it."""

from __future__ import annotations

from kvpatch.patch import Feature, Patch
from kvpatch.registry.releases import KVCACHED_RANGE, VLLM_RANGE
from kvpatch.registry.targets import ENGINE_CORE, V1_RUNNER, V2_RUNNER

FEATURE = Feature(
    name="elastic-memory",
    summary="kvcached's elastic KV memory is really in use, or vLLM does not start",
    vllm=VLLM_RANGE,
    kvcached=KVCACHED_RANGE,
    patches=(
        Patch(
            id="elastic.config",
            target="vllm.config.vllm:VllmConfig.__post_init__",
            why="configurations nobody tested start and give wrong tokens or die later",
            upstream="ovg-project/kvcached#361 (reviewers ask for stated fallback conditions)",
            until="kvcached states and checks the configurations it supports",
            wrapper="kvpatch.configuration:around_post_init",
            parameters=("self",),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="elastic.worker_setup_error",
            target=f"{V1_RUNNER}._init_kvcached",
            why="kvcached logs the error of a failed worker set-up and drops it",
            upstream="ovg-project/kvcached, patch_model_runner_init in 0.1.6",
            until="kvcached raises instead of logging 'disabling'",
            wrapper="kvpatch.allocation:remember_setup_error",
            parameters=("self",),
            vllm=">=0.12,<0.29",
            kvcached="==0.1.6",
        ),
        Patch(
            id="elastic.worker_setup",
            target=f"{V1_RUNNER}.__init__",
            why="after a failed set-up the engine starts half patched and dies later",
            upstream="ovg-project/kvcached, patch_model_runner_init in 0.1.6",
            until="kvcached raises instead of logging 'disabling'",
            wrapper="kvpatch.allocation:require_setup",
            parameters=(),
            vllm=">=0.12,<0.29",
            kvcached="==0.1.6",
        ),
        Patch(
            id="elastic.coordinator",
            target="vllm.v1.core.kv_cache_coordinator:"
            "KVCacheCoordinator._setup_kvcached_coordinator",
            why="kvcached falls back to vLLM's own block pool with a warning",
            upstream="ovg-project/kvcached, KVCacheCoordinatorPatch in 0.1.6",
            until="kvcached raises every error of its coordinator set-up",
            wrapper="kvpatch.allocation:require_coordinator",
            parameters=("self",),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="elastic.kv_cache_tensors",
            target=f"{V1_RUNNER}.initialize_kv_cache_tensors",
            why="nothing tells KV caches on kvcached's memory from others",
            upstream="ovg-project/kvcached#269 (elastic memory silently bypassed)",
            until="kvcached refuses KV caches it did not allocate",
            wrapper="kvpatch.status:around_kv_cache_tensors",
            parameters=("self", "kv_cache_config"),
            vllm=">=0.21,<0.29",
            kvcached="==0.1.6",
        ),
        Patch(
            id="elastic.kv_cache_tensors_v2",
            target="vllm.v1.worker.gpu.model_runner:init_kv_cache",
            why="nothing tells KV caches on kvcached's memory from others",
            upstream="ovg-project/kvcached#269 (elastic memory silently bypassed)",
            until="kvcached refuses KV caches it did not allocate",
            wrapper="kvpatch.status:around_kv_cache_tensors",
            parameters=("kv_cache_config",),
            vllm=">=0.28,<0.29",
            kvcached="==0.1.6",
        ),
        Patch(
            id="elastic.allocation",
            target="kvcached.integration.vllm.model_runner_v2:allocate_kv_cache",
            why="from 0.29 on the KV caches are vLLM's views and bear no mark of kvcached's",
            upstream="ovg-project/kvcached#269 (elastic memory silently bypassed)",
            until="kvcached refuses KV caches it did not allocate",
            wrapper="kvpatch.status:remember_allocation",
            parameters=("config", "device", "layout"),
            vllm=">=0.29,<0.34",
            kvcached="==0.1.6",
        ),
        *(
            Patch(
                id=f"elastic.kv_caches_{name}",
                target=f"{runner}.initialize_kv_cache",
                why="nothing tells KV caches on kvcached's memory from others",
                upstream="ovg-project/kvcached#269 (elastic memory silently bypassed)",
                until="kvcached refuses KV caches it did not allocate",
                wrapper="kvpatch.status:around_initialize_kv_cache",
                parameters=("self", "kv_cache_config", "is_profiling"),
                vllm=">=0.29,<0.34",
                kvcached="==0.1.6",
            )
            for name, runner in (("v1", V1_RUNNER), ("v2", V2_RUNNER))
        ),
        Patch(
            id="elastic.engine_core",
            target=f"{ENGINE_CORE}.__init__",
            why="nothing tells an engine on kvcached's block pool from one on vLLM's own",
            upstream="ovg-project/kvcached#316 (is it on in this process?)",
            until="kvcached refuses to run without its own block pool",
            wrapper="kvpatch.status:around_engine_core",
            parameters=("self", "vllm_config"),
            vllm=">=0.12,<0.34",
            kvcached="==0.1.6",
        ),
    ),
)
