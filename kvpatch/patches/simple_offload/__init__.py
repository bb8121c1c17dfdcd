"""vLLM's SimpleCPUOffloadConnector on kvcached's memory.

The connector holds a reference to every block that one of its copies uses, so that no page is
freed during a copy. The modules here provide what else it requires of its memory and its block
pool.
"""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Kind, Patch, seam
from kvpatch.upstream.targets import COORDINATOR, SIMPLE, SIMPLE_CONNECTOR

_SCHEDULER = f"{SIMPLE}.manager:SimpleCPUOffloadScheduler"

FEATURE = Feature(
    name="simple-connector",
    summary="vLLM's SimpleCPUOffloadConnector, eager and lazy, copies the correct bytes and "
    "keeps its CPU blocks out of kvcached's pool",
    since="0.19",
    optional=True,
    rules="kvpatch.patches.simple_offload.rules:RULES",
    seams=(
        Patch(
            id="simple.cpu_coordinator",
            target=f"{SIMPLE}.manager:get_kv_cache_coordinator",
            why="the pool of CPU blocks becomes a second elastic pool on GPU memory",
            upstream="ovg-project/kvcached, KVCacheCoordinatorPatch in 0.1.6",
            until="kvcached replaces the pool of the GPU's coordinator only",
            wrapper="kvpatch.patches.simple_offload.cpu_pool:around_cpu_coordinator",
            parameters=("kv_cache_config",),
            since="0.19",
        ),
        Patch(
            id="simple.native_pool",
            target=f"{COORDINATOR}._setup_kvcached_coordinator",
            why="allocating a CPU block maps a GPU page, freeing one unmaps live KV",
            upstream="ovg-project/kvcached, KVCacheCoordinatorPatch in 0.1.6",
            until="kvcached replaces the pool of the GPU's coordinator only",
            wrapper="kvpatch.patches.simple_offload.cpu_pool:around_setup",
            parameters=("self",),
            since="0.19",
        ),
        seam(
            Patch(
                id="simple.register_placed",
                target=f"{SIMPLE}.worker:SimpleCPUOffloadWorker.register_kv_caches",
                why="every layer is expected in the first pool, or in the whole reservation",
                upstream="vllm-project/vllm#37160 (the connector), ovg-project/kvcached#361",
                until="the connector takes its regions from the allocator",
                wrapper="kvpatch.patches.simple_offload.registration:around_register_placed",
                parameters=("self", "kv_caches"),
                since="0.29",
            ),
            Patch(
                id="simple.register_kv_caches",
                target=f"{SIMPLE}.worker:SimpleCPUOffloadWorker.register_kv_caches",
                why="a block is sized by kvcached's whole reservation, which is larger",
                upstream="vllm-project/vllm#37160 (the connector), ovg-project/kvcached#361",
                until="the connector takes its regions from the allocator",
                wrapper="kvpatch.patches.simple_offload.registration:around_register",
                parameters=("self", "kv_caches"),
                since="0.19",
                before="0.29",
            ),
        ),
        seam(
            Patch(
                id="simple.copies_in_order",
                target=f"{SIMPLE}.worker:DmaCopyBackend",
                why="a store reads blocks that are still being computed",
                upstream="vllm-project/vllm#46278 (event between computation and store)",
                until="vLLM 0.24",
                wrapper="kvpatch.patches.simple_offload.legacy:ordered_backend",
                parameters=(),
                since="0.19",
                before="0.24",
                kind=Kind.REPLACE,
            ),
            Gap("0.24", None, "a store waits for an event of the computation"),
        ),
        seam(
            Patch(
                id="simple.bind_gpu_block_pool",
                target=f"{_SCHEDULER}.bind_gpu_block_pool",
                why="lazy mode walks the free block queue, which kvcached's pool does not have",
                upstream="ovg-project/kvcached, ElasticBlockPoolPatch in 0.1.6",
                until="kvcached's pool has a free_block_queue",
                wrapper="kvpatch.patches.simple_offload.eviction:around_bind",
                parameters=("self", "gpu_block_pool"),
                since="0.26",
            ),
            Patch(
                id="simple.bind_linked_blocks",
                target=f"{_SCHEDULER}.bind_gpu_block_pool",
                why="as simple.bind_gpu_block_pool; the queue is a linked list, and in both modes "
                "the pool has no ``blocks``",
                upstream="ovg-project/kvcached, NativeBlockPoolMixin in 0.1.6 (for vLLM 0.26)",
                until="vLLM 0.26",
                wrapper="kvpatch.patches.simple_offload.legacy:around_bind",
                parameters=("self", "gpu_block_pool"),
                since="0.19",
                before="0.26",
            ),
        ),
        Patch(
            id="simple.free_blocks",
            target="vllm.v1.core.block_pool:ElasticBlockPool.free_blocks",
            why="kvcached's cap evicts freed blocks before lazy mode can store them",
            upstream="ovg-project/kvcached, ElasticBlockPoolPatch in 0.1.6",
            until="kvcached consults the connector before evicting",
            wrapper="kvpatch.patches.simple_offload.eviction:around_free",
            parameters=("self", "ordered_blocks"),
            since="0.19",
        ),
        Patch(
            id="simple.lazy_stores",
            target=f"{_SCHEDULER}._prepare_lazy_store_specs",
            why="blocks above kvcached's cap must be stored before they are evicted",
            upstream="ovg-project/kvcached, ElasticBlockPoolPatch in 0.1.6",
            until="kvcached consults the connector before evicting",
            wrapper="kvpatch.patches.simple_offload.eviction:around_lazy_stores",
            parameters=("self",),
            since="0.19",
        ),
        Patch(
            id="simple.match",
            target=f"{_SCHEDULER}.get_num_new_matched_tokens",
            why="a burst of prompts evicts blocks that lazy mode has not stored yet",
            upstream="vllm-project/vllm#37160 (the target covers computed tokens, not loads)",
            until="vLLM's lazy mode stores blocks that an allocation is about to evict",
            wrapper="kvpatch.patches.simple_offload.eviction:around_match",
            parameters=("self", "request", "num_computed_tokens"),
            since="0.19",
        ),
        Patch(
            id="simple.stored",
            target=f"{_SCHEDULER}._process_store_completion",
            why="a stored block moves to the end of the order, and others are evicted before it",
            upstream="vllm-project/vllm#40332 (return it to the head)",
            until="vLLM returns stored blocks to the head of its queue",
            wrapper="kvpatch.patches.simple_offload.eviction:around_stored",
            parameters=("self", "gpu_block_ids"),
            since="0.19",
        ),
        seam(
            Patch(
                id="simple.stores_once",
                target=f"{_SCHEDULER}._prepare_eager_store_specs",
                why="a block that two requests share is stored twice, in two CPU blocks",
                upstream="vllm-project/vllm#41289 (track stores in flight)",
                until="vLLM 0.22",
                wrapper="kvpatch.patches.simple_offload.legacy:around_eager_stores",
                parameters=("self", "scheduler_output"),
                since="0.19",
                before="0.22",
            ),
            Gap("0.22", None, "fixed by vllm-project/vllm#41289"),
        ),
        seam(
            Patch(
                id="simple.pending_work",
                target=f"{SIMPLE_CONNECTOR}.has_pending_push_work",
                why="an idle engine never observes that a copy has completed: pages stay mapped",
                upstream="vllm-project/vllm#45595 (the hook used here)",
                until="vLLM's connector requests steps for aborted loads, and kvcached for its cap",
                wrapper="kvpatch.patches.simple_offload.lifetime:around_pending_work",
                parameters=("self",),
                since="0.24",
            ),
            Patch(
                id="simple.has_requests",
                target="vllm.v1.core.sched.scheduler:Scheduler.has_requests",
                why="as simple.pending_work; a connector cannot request steps",
                upstream="vllm-project/vllm#45595 (the hook added in 0.24)",
                until="vLLM 0.24",
                wrapper="kvpatch.patches.simple_offload.legacy:around_has_requests",
                parameters=("self",),
                since="0.19",
                before="0.24",
            ),
        ),
        Patch(
            id="simple.shutdown",
            target=f"{SIMPLE_CONNECTOR}.shutdown",
            why="kvcached unmaps all memory at shutdown while copies are in flight",
            upstream="vllm-project/vllm, SimpleCPUOffloadConnector has no shutdown",
            until="vLLM's connector waits for its copies at shutdown",
            wrapper="kvpatch.patches.simple_offload.lifetime:around_shutdown",
            parameters=("self",),
            since="0.19",
        ),
        Patch(
            id="observing.simple_plan",
            target=f"{_SCHEDULER}.build_connector_meta",
            why="this connector has no stats, so that its transfers are not visible",
            upstream="vllm-project/vllm#57251 (metrics for every connector)",
            until="SimpleCPUOffloadConnector has stats of its own",
            wrapper="kvpatch.patches.simple_offload.metrics:around_plan",
            parameters=("self", "scheduler_output"),
            since="0.19",
        ),
    ),
)
