"""Elastic memory: an engine's KV cache is on kvcached's memory, or the engine does not start."""

from __future__ import annotations

from kvpatch.rows import Row, feature, gap, replacement, seam
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import COORDINATOR, ENGINE_CORE, V1_RUNNER, V2_RUNNER

_IPC = "kvcached.tp_ipc_util"
_RAISES = ("0.29", "a failed set-up raises; see elastic_memory.worker_init")
_LOGGED = (
    "ovg-project/kvcached, patch_model_runner_init in 0.1.6",
    "kvcached raises instead of logging 'disabling'",
)
_BYPASSED = (
    "ovg-project/kvcached#269 (elastic memory silently bypassed)",
    "kvcached refuses KV caches it did not allocate",
)
_PART_OF_A_PAGE = (
    "blocks of a page that they do not fill are counted and never mapped: a KV cache smaller than "
    "a page never starts, and a request that needs them waits for ever"
)
_NULL_BLOCK = "ovg-project/kvcached, _reserve_null_block in kv_cache_manager.py in 0.1.6"
_ROUNDED = "kvcached refuses a pool without a page, and vLLM counts the blocks of whole pages"

FEATURE = feature(
    __name__,
    summary="the KV cache is on kvcached's elastic memory, or vLLM does not start",
    since=FLOOR,
    prepare="ipc_name:give_name",
    rules="rules:RULES",
    seams=(
        Row(
            "elastic_memory.config",
            "vllm.config.vllm:VllmConfig.__post_init__",
            "configuration:around_post_init",
            "untested configurations start, and produce wrong tokens or fail later",
            "ovg-project/kvcached#361 (reviewers request explicit fallback conditions)",
            "kvcached documents and checks the configurations it supports",
        ),
        Row(
            "elastic_memory.worker_setup_error",
            f"{V1_RUNNER}._init_kvcached",
            "allocation:remember_setup_error",
            "kvcached logs the error of a failed worker set-up and ignores it",
            *_LOGGED,
            later=_RAISES,
        ),
        Row(
            "elastic_memory.worker_setup",
            f"{V1_RUNNER}.__init__",
            "allocation:require_setup()",
            "after a failed set-up the engine starts partially patched and fails later",
            *_LOGGED,
            later=_RAISES,
        ),
        Row(
            "elastic_memory.worker_init",
            "kvcached.integration.vllm.interfaces:init_kvcached",
            "allocation:around_worker_setup(tp_rank, world_size, pp_rank, is_worker)",
            "where kvcached raises the error of a failed set-up, it does not say what failed",
            "ovg-project/kvcached, model_runner_v2.py in 0.1.6",
            "kvcached says that it could not be set up, and why",
        ),
        Row(
            "elastic_memory.socket_folder",
            f"{_IPC}:_start_worker_listener_thread",
            "sockets:around_listener(rank, pp_rank)",
            "a folder in /tmp that another user made first is used: he can run code as the "
            "engine's user; with an open umask anybody connects to a worker",
            "ovg-project/kvcached, os.makedirs in tp_ipc_util.py in 0.1.6",
            "kvcached checks the owner of its sockets' folder",
        ),
        Row(
            "elastic_memory.socket_path",
            f"{_IPC}:get_worker_socket_path",
            "sockets:around_path(rank, pp_rank)",
            "an engine unpickles what any socket of that name answers",
            "ovg-project/kvcached, pickle.loads in tp_ipc_util.py in 0.1.6",
            "kvcached checks the owner of its sockets' folder",
        ),
        Row(
            "elastic_memory.socket_peer",
            f"{_IPC}:recv_msg",
            "sockets:around_receive(sock)",
            "a worker unpickles what any user sends",
            "ovg-project/kvcached, pickle.loads in tp_ipc_util.py in 0.1.6",
            "kvcached checks who connects",
        ),
        Row(
            "elastic_memory.rank_memory_reply",
            f"{_IPC}:send_msg",
            "ranks:around_send(sock, msg)",
            "an engine cannot see the free memory of its workers' GPUs",
            "ovg-project/kvcached, get_avail_physical_pages in 0.1.6",
            "kvcached counts the memory of every rank",
        ),
        Row(
            "elastic_memory.rank_memory",
            "kvcached.kv_cache_manager:KVCacheManager._get_cached_avail_physical_pages",
            "ranks:around_available",
            "the free memory of one GPU counts for all: where another rank's GPU is full, "
            "cached blocks are not evicted, and every allocation fails",
            "ovg-project/kvcached, get_avail_physical_pages in 0.1.6",
            "kvcached counts the memory of every rank",
        ),
        Row(
            "elastic_memory.rank_failure",
            "kvcached.kv_cache_manager:KVCacheManager._rollback_partial_alloc",
            "ranks:around_failed_map",
            "a map that fails on one rank is tried again in every step",
            "ovg-project/kvcached, KVCacheManager._alloc in 0.1.6",
            "kvcached counts the memory of every rank",
        ),
        replacement(
            "elastic_memory.available",
            "kvcached.kv_cache_manager:KVCacheManager.available_size",
            "available:remembered",
            "the page allocator is asked for its pages before every allocation of every request",
            "ovg-project/kvcached, KVCacheManager.available_size in 0.1.6",
            "kvcached counts its pages when they change",
        ),
        Row(
            "elastic_memory.limit",
            "kvcached.kv_cache_manager:KVCacheManager.resize",
            "limit:around_resize(self, new_mem_size)",
            "a limit above the memory that an engine started with stops it",
            "ovg-project/kvcached, PageAllocator::resize in 0.1.6",
            "kvcached clamps the limit in its pool as it does in set_memory_limit",
        ),
        replacement(
            "elastic_memory.shrink",
            "kvcached.kv_cache_manager:KVCacheManager._maybe_finish_shrink",
            "limit:looked_at",
            "while a limit waits the blocks of all pages are counted in every free and every step",
            "ovg-project/kvcached, KVCacheManager._get_num_alloced_blocks in 0.1.6",
            "kvcached asks for its pages in use before it counts their blocks",
        ),
        Row(
            "elastic_memory.eviction",
            "vllm.v1.core.block_pool:ElasticBlockPool._evict_blocks_from_pool",
            "eviction:around_evict(self, num_to_evict, page_aware)",
            "every eviction lists all cached blocks, and the cap on them sorts them by pages for "
            "each request that ends",
            "ovg-project/kvcached, ElasticBlockPool._page_aligned_victims in 0.1.6",
            "an eviction costs kvcached what it evicts, and not what is cached",
        ),
        Row(
            "elastic_memory.reservation",
            "kvcached.kv_cache_manager:KVCacheManager._wait_post_init",
            "reservation:around_wait",
            "a request that comes before block 0 is reserved waits for ever, with asynchronous "
            "scheduling",
            "ovg-project/kvcached, _wait_post_init in kv_cache_manager.py in 0.1.6",
            "kvcached waits without the lock that the reservation needs",
        ),
        Row(
            "elastic_memory.coordinator",
            f"{COORDINATOR}._setup_kvcached_coordinator",
            "allocation:require_coordinator",
            "kvcached falls back to vLLM's own block pool with a warning",
            "ovg-project/kvcached, KVCacheCoordinatorPatch in 0.1.6",
            "kvcached raises every error of its coordinator set-up",
        ),
        seam(
            Row(
                "elastic_memory.kv_cache_tensors",
                f"{V1_RUNNER}.initialize_kv_cache_tensors",
                "verify:around_kv_cache_tensors(self, kv_cache_config)",
                "KV caches outside kvcached's memory go unnoticed",
                *_BYPASSED,
            ),
            Row(
                "elastic_memory.kv_caches_v1",
                f"{V1_RUNNER}.initialize_kv_cache",
                "verify:around_initialize_kv_cache(self, kv_cache_config, is_profiling)",
                since="0.29",
            ),
        ),
        seam(
            gap("Model Runner V2 is refused (KVP326)"),
            Row(
                "elastic_memory.kv_cache_tensors_v2",
                "vllm.v1.worker.gpu.model_runner:init_kv_cache",
                "verify:around_kv_cache_tensors(kv_cache_config)",
                "KV caches outside kvcached's memory go unnoticed",
                *_BYPASSED,
                since="0.28",
            ),
            Row(
                "elastic_memory.kv_caches_v2",
                f"{V2_RUNNER}.initialize_kv_cache",
                "verify:around_initialize_kv_cache(self, kv_cache_config, is_profiling)",
                since="0.29",
            ),
        ),
        seam(
            Row(
                "elastic_memory.whole_pages_older",
                f"{ENGINE_CORE}._initialize_kv_caches",
                "legacy:around_kv_caches(self, vllm_config)",
                _PART_OF_A_PAGE,
                _NULL_BLOCK,
                _ROUNDED,
            ),
            Row("elastic_memory.whole_pages", wrapper="capacity:around_kv_caches", since="0.29"),
        ),
        Row(
            "elastic_memory.stages",
            "vllm.v1.engine.core:get_kv_cache_configs",
            "stages:around_kv_cache_configs(vllm_config)",
            "a pipeline whose stages have different layers starts, and its requests wait for ever",
            "ovg-project/kvcached, KVCacheManager in 0.1.6: its pages are the first stage's",
            "kvcached maps a page by the layers of each stage",
        ),
        Row(
            "elastic_memory.allocation",
            "kvcached.integration.vllm.model_runner_v2:allocate_kv_cache",
            "verify:remember_allocation(config, device, layout)",
            "from 0.29 on the KV caches are vLLM's views, without kvcached's mark",
            *_BYPASSED,
            since="0.29",
            earlier="kvcached marks the KV caches that it allocates",
        ),
        Row(
            "elastic_memory.addresses",
            "kvcached.integration.vllm.model_runner_v2:allocate_kv_cache",
            "capacity:around_allocation(config, device)",
            "a KV cache larger than the device ends a worker with an error that names neither",
            "ovg-project/kvcached, allocate_kv_cache in model_runner_v2.py in 0.1.6",
            "kvcached says how large both are",
            since="0.29",
            earlier="kvcached logs that it has fewer blocks, and allocates those",
        ),
        Row(
            "elastic_memory.rollback",
            "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
            "allocation:around_allocate_slots",  # of kvcached's wrapper, which names self only
            "a partially failed allocation ends the engine when it is retried",
            "ovg-project/kvcached, patch_allocate_slots in 0.1.6 (0.28 to 0.30 only)",
            "kvcached rolls failed allocations back on every release",
            later=(
                "0.28",
                "kvcached rolls them back itself, from 0.31 on by kvcached_version.allocate_slots",
            ),
        ),
        Row(
            "elastic_memory.hits_of_all_groups",
            f"{COORDINATOR}.allocate_new_computed_blocks",
            "legacy:around_computed_blocks(self, new_computed_blocks, "
            "num_local_computed_tokens, num_external_computed_tokens)",
            "the blocks that one group loads into are the next one's prefix, evicted",
            "vllm-project/vllm#33775, vllm-project/vllm#44409",
            since="0.19",
            earlier="a model with a connector has one group of KV cache",
            later=("0.24", "all groups touch their hits before one allocates"),
        ),
        Row(
            "elastic_memory.engine_core",
            f"{ENGINE_CORE}.__init__",
            "verify:around_engine_core(self, vllm_config)",
            "an engine that uses vLLM's own block pool goes unnoticed",
            "ovg-project/kvcached#316 (is it on in this process?)",
            "kvcached refuses to run without its own block pool",
        ),
        Row(
            "elastic_memory.environment",
            f"{ENGINE_CORE}.__init__",
            "environment:around_engine_core(self, vllm_config)",
            "vLLM adds a variable to the environment while a thread of kvcached may be reading "
            "it, which ends an engine in thousands with a segmentation fault while it starts",
            "vllm-project/vllm, `enable_envs_cache` in vllm/envs.py, which sets "
            "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME; ovg-project/kvcached, the logger's `getenv` in "
            "0.1.6",
            "kvcached reads its level of logging once",
        ),
        Row(
            "elastic_memory.engine_name",
            f"{ENGINE_CORE}.__init__",
            "ipc_name:around_engine_start(self, vllm_config)",
            "engines of one process group share kvcached's page limit and workers' sockets; "
            "the pool's file can be locked by every user, and is sparse: a full /dev/shm kills",
            "ovg-project/kvcached, _obtain_default_ipc_name in 0.1.6",
            "kvcached gives every engine a unique name",
        ),
        Row(
            "elastic_memory.engine_name_end",
            f"{ENGINE_CORE}.shutdown",
            "ipc_name:after_engine_shutdown",
            "a script must be able to start another engine after the first has shut down",
            "none: the name is kvpatch's",
            "kvcached gives every engine a unique name",
        ),
    ),
)
