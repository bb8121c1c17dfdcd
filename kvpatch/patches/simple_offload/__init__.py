"""vLLM's SimpleCPUOffloadConnector on kvcached's memory.

It holds a reference to every block that its copies use, so that no page is freed during a copy.
"""

from __future__ import annotations

from kvpatch.rows import Row, feature, replacement, seam
from kvpatch.upstream.targets import COORDINATOR, SIMPLE, SIMPLE_CONNECTOR

_SCHEDULER = f"{SIMPLE}.manager:SimpleCPUOffloadScheduler"
_WORKER = f"{SIMPLE}.worker:SimpleCPUOffloadWorker"
_FAILED = "as simple_offload.copy_loop"
_NO_FAILURE = (
    "vllm-project/vllm#37160 (the connector), whose copies are expected to succeed",
    "the connector handles copies that fail",
)
_EVERY_POOL = (
    "ovg-project/kvcached, KVCacheCoordinatorPatch in 0.1.6",
    "kvcached replaces the pool of the GPU's coordinator only",
)
_CAP = (
    "ovg-project/kvcached, ElasticBlockPoolPatch in 0.1.6",
    "kvcached consults the connector before evicting",
)

FEATURE = feature(
    __name__,
    summary="vLLM's SimpleCPUOffloadConnector, eager and lazy, copies the correct bytes and keeps "
    "its CPU blocks out of kvcached's pool",
    since="0.19",
    rules="rules:RULES",
    optional=True,
    seams=(
        Row(
            "simple_offload.cpu_coordinator",
            f"{SIMPLE}.manager:get_kv_cache_coordinator",
            "cpu_pool:around_cpu_coordinator(kv_cache_config)",
            "the pool of CPU blocks becomes a second elastic pool on GPU memory",
            *_EVERY_POOL,
        ),
        Row(
            "simple_offload.native_pool",
            f"{COORDINATOR}._setup_kvcached_coordinator",
            "cpu_pool:around_setup",
            "allocating a CPU block maps a GPU page, freeing one unmaps live KV",
            *_EVERY_POOL,
        ),
        seam(
            Row(
                "simple_offload.register_placed",
                f"{SIMPLE}.worker:SimpleCPUOffloadWorker.register_kv_caches",
                "registration:around_register_placed(self, kv_caches)",
                "every layer is expected in the first pool, or in the whole reservation",
                "vllm-project/vllm#37160 (the connector), ovg-project/kvcached#361",
                "the connector takes its regions from the allocator",
                since="0.29",
            ),
            Row(
                "simple_offload.register_kv_caches",
                wrapper="registration:around_register",
                why="a block is sized by kvcached's whole reservation, which is larger",
                until="the connector takes its regions from the allocator",
            ),
        ),
        replacement(
            "simple_offload.copies_in_order",
            f"{SIMPLE}.worker:DmaCopyBackend",
            "legacy:ordered_backend",
            "a store reads blocks that are still being computed, and a load overtakes what "
            "is still written into its blocks",
            "vllm-project/vllm#46278 (event between computation and store), "
            "vllm-project/vllm#45357 (deferred frees)",
            later=("0.24", "a store waits for an event of the computation"),
        ),
        Row(
            "simple_offload.loads_in_order",
            f"{SIMPLE}.copy_backend:DmaCopyBackend.launch_copy",
            "legacy:around_load(self, is_store)",
            "a load overwrites blocks of a window that a step in flight still reads",
            "vllm-project/vllm#47282, vllm-project/vllm#47728",
            since="0.24",
            earlier="simple_offload.copies_in_order orders loads too",
            later=("0.26", "blocks leave a window when the step that reads them has ended"),
        ),
        Row(
            "simple_offload.computed_tokens",
            f"{_SCHEDULER}.get_num_new_matched_tokens",
            "fixes:around_match(self, request)",
            "a prompt whose log-probabilities are asked for is loaded, not computed",
            "vllm-project/vllm#54998",
            later=("0.30", "fixed by vllm-project/vllm#54998"),
        ),
        Row(
            "simple_offload.reset_pinned",
            f"{_SCHEDULER}.reset",
            "fixes:before_reset",
            "a reset keeps the whole tier while a request waits with a hit in it",
            "vllm-project/vllm, SimpleCPUOffloadScheduler.reset in 0.32",
            since="0.24",
            earlier="the connector cannot be reset",
            later=("0.32", "the hits of requests that wait are released first"),
        ),
        seam(
            Row(
                "simple_offload.bind_gpu_block_pool",
                f"{_SCHEDULER}.bind_gpu_block_pool",
                "eviction:around_bind(self, gpu_block_pool)",
                "lazy mode walks the free block queue, which kvcached's pool does not have",
                "ovg-project/kvcached, ElasticBlockPoolPatch in 0.1.6",
                "kvcached's pool has a free_block_queue",
                since="0.26",
            ),
            Row(
                "simple_offload.bind_linked_blocks",
                wrapper="legacy:around_bind",
                but="the queue is a linked list, and in both modes the pool has no ``blocks``",
                upstream="ovg-project/kvcached, NativeBlockPoolMixin in 0.1.6 (for vLLM 0.26)",
            ),
        ),
        Row(
            "simple_offload.free_blocks",
            "vllm.v1.core.block_pool:ElasticBlockPool.free_blocks",
            "eviction:around_free(self, ordered_blocks)",
            "kvcached's cap evicts freed blocks before lazy mode can store them",
            *_CAP,
        ),
        Row(
            "simple_offload.lazy_stores",
            f"{_SCHEDULER}._prepare_lazy_store_specs",
            "eviction:around_lazy_stores",
            "blocks above kvcached's cap must be stored before they are evicted",
            *_CAP,
        ),
        Row(
            "simple_offload.match",
            f"{_SCHEDULER}.get_num_new_matched_tokens",
            "eviction:around_match(self, request, num_computed_tokens)",
            "a burst of prompts evicts blocks that lazy mode has not stored yet",
            "vllm-project/vllm#37160 (the target covers computed tokens, not loads)",
            "vLLM's lazy mode stores blocks that an allocation is about to evict",
        ),
        Row(
            "simple_offload.stored",
            f"{_SCHEDULER}._process_store_completion",
            "eviction:around_stored(self, gpu_block_ids)",
            "a stored block moves to the end of the order, and others are evicted before it",
            "vllm-project/vllm#40332 (return it to the head)",
            "vLLM returns stored blocks to the head of its queue",
        ),
        Row(
            "simple_offload.copy_loop",
            f"{SIMPLE}.copy_backend:DmaCopyBackend._copy_loop",
            "failures:around_copy_loop(q, device, load_stream, store_stream)",
            "the copy thread ends without a word when a copy fails: loads never end",
            *_NO_FAILURE,
        ),
        Row(
            "simple_offload.copies_polled",
            f"{_WORKER}._poll_stream_events",
            "failures:around_events(self, is_store)",
            f"{_FAILED}; here the worker hears of it",
            *_NO_FAILURE,
        ),
        Row(
            "simple_offload.copies_awaited",
            f"{_WORKER}._flush_and_sync_all",
            "failures:around_events",
            f"{_FAILED}; here the worker waits for it",
            *_NO_FAILURE,
        ),
        Row(
            "simple_offload.failed_stores",
            f"{_WORKER}.build_connector_worker_meta",
            "failures:around_report",
            f"{_FAILED}; a worker can only report that a store is complete",
            *_NO_FAILURE,
        ),
        Row(
            "simple_offload.failed_loads",
            f"{SIMPLE_CONNECTOR}.get_block_ids_with_load_errors",
            "failures:around_load_errors",
            f"{_FAILED}; the connector reports no blocks that were not loaded",
            *_NO_FAILURE,
        ),
        Row(
            "simple_offload.reports",
            f"{_SCHEDULER}.update_connector_output",
            "failures:around_output(self, connector_output)",
            f"{_FAILED}; the scheduler does not expect a report of a failed store",
            *_NO_FAILURE,
        ),
        Row(
            "simple_offload.not_stored",
            f"{_SCHEDULER}._process_store_completion",
            "failures:around_completion(self, gpu_block_ids, cpu_block_ids)",
            f"{_FAILED}; the CPU tier would offer blocks that were not stored",
            *_NO_FAILURE,
        ),
        Row(
            "simple_offload.stores_once",
            f"{_SCHEDULER}._prepare_eager_store_specs",
            "legacy:around_eager_stores(self, scheduler_output)",
            "a block that two requests share is stored twice, in two CPU blocks",
            "vllm-project/vllm#41289 (track stores in flight)",
            later=("0.22", "fixed by vllm-project/vllm#41289"),
        ),
        seam(
            Row(
                "simple_offload.pending_work",
                f"{SIMPLE_CONNECTOR}.has_pending_push_work",
                "lifetime:around_pending_work",
                "an idle engine never observes that a copy has completed: pages stay mapped",
                "vllm-project/vllm#45595 (the hook used here)",
                "vLLM's connector requests steps for aborted loads, and kvcached for its cap",
                since="0.24",
            ),
            Row(
                "simple_offload.has_requests",
                "vllm.v1.core.sched.scheduler:Scheduler.has_requests",
                "legacy:around_has_requests",
                but="a connector cannot request steps",
                upstream="vllm-project/vllm#45595 (the hook added in 0.24)",
            ),
        ),
        Row(
            "simple_offload.shutdown",
            f"{SIMPLE_CONNECTOR}.shutdown",
            "lifetime:around_shutdown",
            "kvcached unmaps all memory at shutdown while copies are in flight",
            "vllm-project/vllm, SimpleCPUOffloadConnector has no shutdown",
            "vLLM's connector waits for its copies at shutdown",
        ),
        Row(
            "simple_offload.simple_plan",
            f"{_SCHEDULER}.build_connector_meta",
            "metrics:around_plan(self, scheduler_output)",
            "this connector has no stats, so that its transfers are not visible",
            "vllm-project/vllm#57251 (metrics for every connector)",
            "SimpleCPUOffloadConnector has stats of its own",
        ),
    ),
)
