"""Rows for vLLM's OffloadingConnector."""

from __future__ import annotations

from kvpatch.patch import Feature, Patch
from kvpatch.registry.releases import KVCACHED_RANGE, VLLM_RANGE
from kvpatch.registry.targets import OFFLOADING

FEATURE = Feature(
    name="offloading-connector",
    summary="vLLM's OffloadingConnector copies the right bytes of kvcached's memory",
    vllm=VLLM_RANGE,
    kvcached=KVCACHED_RANGE,
    patches=(
        Patch(
            id="offloading.use_uniform_kv_cache",
            target="vllm.v1.worker.kv_connector_model_runner_mixin:"
            "KVConnectorModelRunnerMixin.use_uniform_kv_cache",
            why="a cross-layer KV cache is one torch.zeros that bypasses kvcached's memory",
            upstream="ovg-project/kvcached#269, ovg-project/kvcached#361",
            until="kvcached allocates cross-layer KV caches itself, or vLLM 0.29 (path removed)",
            wrapper="kvpatch.allocation:keep_elastic",
            parameters=("attn_groups",),
            vllm=">=0.12,<0.29",
            kvcached="==0.1.6",
        ),
        Patch(
            id="offloading.register_kv_caches",
            target=f"{OFFLOADING}.worker:OffloadingConnectorWorker.register_kv_caches",
            why="vLLM registers a dense tensor a layer, so other blocks' bytes are copied",
            upstream="ovg-project/kvcached#361 (asks to keep the cross-layer speed)",
            until="the connector asks the allocator for its regions",
            wrapper="kvpatch.geometry:register_regions",
            parameters=("self", "kv_caches"),
            vllm=">=0.26,<0.29",
            kvcached="==0.1.6",
        ),
        Patch(
            id="offloading.register_with_spec",
            target=f"{OFFLOADING}.worker:OffloadingConnectorWorker.register_kv_caches",
            why="as offloading.register_kv_caches; the KV cache's plan is in the spec",
            upstream="ovg-project/kvcached#361 (asks to keep the cross-layer speed)",
            until="vLLM 0.26",
            wrapper="kvpatch.older_connectors:register_with_spec",
            parameters=("self", "kv_caches"),
            vllm=">=0.25,<0.26",
            kvcached="==0.1.6",
        ),
        Patch(
            id="offloading.register_with_handlers",
            target=f"{OFFLOADING}.worker:OffloadingConnectorWorker.register_kv_caches",
            why="as offloading.register_kv_caches; the worker has a handler for each direction",
            upstream="ovg-project/kvcached#361 (asks to keep the cross-layer speed)",
            until="vLLM 0.25",
            wrapper="kvpatch.older_connectors:register_with_handlers",
            parameters=("self", "kv_caches"),
            vllm=">=0.19,<0.25",
            kvcached="==0.1.6",
        ),
        Patch(
            id="offloading.register_with_backends",
            target=f"{OFFLOADING}_connector:OffloadingConnectorWorker.register_kv_caches",
            why="as offloading.register_kv_caches; attention backends say where blocks lie",
            upstream="ovg-project/kvcached#361 (asks to keep the cross-layer speed)",
            until="vLLM 0.19",
            wrapper="kvpatch.older_connectors:register_with_backends",
            parameters=("self", "kv_caches"),
            vllm=">=0.16,<0.19",
            kvcached="==0.1.6",
        ),
        Patch(
            id="offloading.storable_chunks",
            target=f"{OFFLOADING}.scheduler:RequestOffloadState.storable_chunks",
            why="a request that is aborted before it ran, or while it is computed, ends the engine",
            upstream="vllm-project/vllm#49118, vllm-project/vllm#49146",
            until="vLLM 0.27",
            wrapper="kvpatch.older_connectors:around_storable",
            parameters=("self", "group_config", "num_offloadable_tokens"),
            vllm=">=0.26,<0.27",
            kvcached="==0.1.6",
        ),
        Patch(
            id="offloading.check_regions",
            target=f"{OFFLOADING}.worker:OffloadingConnectorWorker._init_worker",
            why="nothing checks that what vLLM copies is what kvcached's blocks are",
            upstream="none: from 0.29 on vLLM's regions follow the layout, and are right",
            until="the connector asks the allocator for its regions",
            wrapper="kvpatch.geometry:check_regions",
            parameters=("self", "kv_caches"),
            vllm=">=0.29,<0.34",
            kvcached="==0.1.6",
        ),
    ),
)
