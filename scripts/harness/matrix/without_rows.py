"""Which engines show what a row of the newest release is for, and which test does where none can.

A row that more than one connector, layout or runner brings has a look for each in which something
else could be seen. ``test`` is there for what no engine of ``LOADS`` comes to: several GPUs or
ranks, other users of the machine, damaged files, a metric. ``why`` says what stands in the way.
"""

from typing import NamedTuple

from harness.matrix.without import Look


class Row(NamedTuple):
    """How the need of a row is shown.

    Attributes:
        looks: engines that are started without it.
        test: ``file::function`` under tests/, which fails without it.
        why: why no engine here shows it; empty where one does.
    """

    looks: tuple[Look, ...] = ()
    test: str = ""
    why: str = ""


def seen(*loads: str) -> Row:
    """Return a row that engines show."""
    return Row(tuple(Look(load) for load in loads))


def held(test: str, why: str, *loads: str) -> Row:
    """Return a row that a test shows, with the loads under which engines were tried."""
    return Row(tuple(Look(load) for load in loads), test, why)


OFFLOADING, V2, EXHAUSTED = "Offloading", "Offloading, Runner V2", "Offloading, exhausted"
LATENT, HELD, LATE = "Offloading, latent attention", "held copies", "late store"
EAGER, LAZY, CAPPED, TIERS = "Simple eager", "Simple lazy", "Simple lazy, capped", "tiering fs"
TWO_RANKS = "one rank only, whose device is this process's own"
USERS = "needs another user on the machine"
SEVERAL_GPUS = "needs several GPUs, of which one is full"
GPU_WORKER = "a CPU's worker does not run it"
SERIES = "changes no answer and no memory: what is counted is not shown"
LAST_GUARD = "a guard behind others: nothing here gets past those"
POOL_OFF = "no load here asks for a host pool; the tests have all rows of it or none"
KERNEL = "vLLM 0.32's own kernel attends to the same rows; the test passes without this row"
ORDER = "which of two stored blocks is evicted first changes no answer and no count"
STEPPED = "the driver steps an engine until it is at rest, where a served one sleeps"
WHOLE = "debug mode has nothing to find while every other row is there"
NPU = "needs an NPU, or the emulated one, which has no cells"
UNASKED = "no load here suspends an engine or lowers its limit"
AWAKE = "no load here lets an engine sleep"
PAGEABLE = "memory that is not registered is copied all the same"

TELEMETRY = "unit/test_telemetry.py::"
LOOKUPS = "unit/test_lookups.py::"
COPIES = "engine/test_hostdevice_copies.py::"
CLASSES = "engine/test_tier_classes.py::"
WEIGHTS = "unit/test_tier_weights.py::"
POOL = "engine/test_pool.py::"
RANKS = "unit/test_ranks.py::"
FAILED = "unit/test_failed_copies.py::"
NO_COPY_FAILS = "no copy fails here"
RESETS = "engine/test_resets.py::"
ASCEND = "unit/test_ascend.py::"
WORKER = "npu/test_npu_worker.py::"
SUSPEND = "long/test_suspend.py::"
SLEEP = "long/test_sleep.py::"
HOOKS = "unit/test_suspend_hooks.py::"

ROWS: dict[str, Row] = {
    "kvcached_version.runner_v2": seen(OFFLOADING, V2),
    "kvcached_version.block_pool": seen(OFFLOADING),
    "kvcached_version.coordinator": held(
        "unit/test_kvcached_adapters.py::test_kvcached_is_told_a_release_for_one_decision",
        "with one size of block the layouts of 0.30 give the same numbers",
        *(OFFLOADING, EXHAUSTED),
    ),
    "kvcached_version.allocate_slots": seen(EXHAUSTED),
    "kvcached_version.engine_core": seen(OFFLOADING),
    "ascend.torch": held(f"{ASCEND}test_kvcached_reads_the_npus_memory_as_cudas", NPU),
    "ascend.device_name": held(f"{ASCEND}test_kvcached_knows_an_npu_by_the_name_of_cuda", NPU),
    "ascend.listener_device": held(f"{ASCEND}test_the_listener_selects_no_cuda_device", NPU),
    "ascend.sync_before_unmap": held(
        f"{ASCEND}test_the_whole_npu_is_waited_for_before_an_unmap", NPU
    ),
    "ascend.release_barrier": held(
        f"{ASCEND}test_the_barrier_waits_for_the_workers_npu_and_is_pickled_by_name", NPU
    ),
    "ascend.allocation": held(f"{ASCEND}test_the_kv_cache_is_allocated_by_kvcached", NPU),
    "ascend.halves": held(f"{ASCEND}test_the_kv_cache_is_allocated_by_kvcached", NPU),
    "ascend.kv_cache_tensors": held(f"{ASCEND}test_a_kv_cache_that_is_not_kvcacheds_is_seen", NPU),
    "ascend.worker_shutdown": held(f"{ASCEND}test_kvcacheds_listener_ends_with_the_worker", NPU),
    "ascend.register_kv_caches": held(
        f"{WORKER}test_without_the_row_v_is_lost_without_an_error", NPU
    ),
    "host_device.torch": seen(OFFLOADING),
    "host_device.device_name": seen(OFFLOADING, V2),
    "host_device.listener_device": seen(OFFLOADING, V2),
    "host_device.sync_before_unmap": seen(OFFLOADING, HELD),
    "host_device.release_barrier": seen(OFFLOADING, LATE),
    "host_device.size_for_v2": seen(V2),
    "host_device.layouts": seen(OFFLOADING),
    "host_device.latent_caching": seen(LATENT),
    "host_device.latent_write": seen(LATENT),
    "host_device.latent_decode": held(
        "long/test_latent_attention.py::test_a_token_attends_to_its_own_context", KERNEL, LATENT
    ),
    "host_device.latent_gather": seen(LATENT),
    "host_copies.copy_torch": seen(OFFLOADING),
    "host_copies.copy_blocks": seen(OFFLOADING),
    "host_copies.copy_platform": seen(OFFLOADING),
    "host_copies.copy_pinned": held(
        f"{COPIES}test_the_shared_region_is_registered_and_deregistered_and_leaves_no_file",
        PAGEABLE,
        OFFLOADING,
    ),
    "host_copies.copy_spec": seen(OFFLOADING),
    "host_copies.copy_register": held(
        f"{COPIES}test_the_shared_region_is_registered_and_deregistered_and_leaves_no_file",
        PAGEABLE,
        OFFLOADING,
    ),
    "host_copies.copy_register_platform": held(
        f"{COPIES}test_the_shared_region_is_registered_and_deregistered_and_leaves_no_file",
        PAGEABLE,
        OFFLOADING,
    ),
    "host_copies.copy_device": seen(OFFLOADING),
    "host_copies.simple_torch": seen(EAGER),
    "host_copies.simple_pinned": held(
        f"{COPIES}test_the_simple_connectors_tier_is_registered_as_strictly", PAGEABLE, EAGER
    ),
    "host_copies.simple_register": seen(EAGER),
    "host_copies.simple_memcpy": seen(EAGER),
    "host_copies.simple_events": seen(EAGER),
    "host_copies.simple_device": held(
        f"{COPIES}test_vllms_simple_backend_copies_there_and_back_behind_what_it_waits_for",
        "vLLM's CPU platform selects a device as well, which does nothing: the test is of the "
        "thread, and passes without this row",
        EAGER,
    ),
    "kvcached_adapters.pool_attributes": seen(OFFLOADING, "events"),
    "kvcached_adapters.request_memory": held(
        "unit/test_kvcached_adapters.py::test_weights_held_elsewhere_are_taken_off_the_budget",
        GPU_WORKER,
    ),
    "kvcached_adapters.profiling": held(
        "unit/test_kvcached_adapters.py::test_the_profile_runs_in_what_vllm_puts_around_it",
        GPU_WORKER,
    ),
    "kvcached_adapters.partial_tail": held(
        "unit/test_partial_tails.py::test_a_boundary_that_was_passed_is_not_named",
        "plain vLLM 0.32 ends on a CPU with a model that has Mamba layers",
    ),
    "kvcached_adapters.v1_worker": seen(OFFLOADING),
    "kvcached_adapters.v1_profiling": seen(OFFLOADING),
    "kvcached_adapters.v1_allocation": seen(OFFLOADING),
    "elastic_memory.config": seen("tiering fs, priority"),
    "elastic_memory.environment": held(
        "long/test_environment.py::"
        "test_an_engine_adds_no_variable_after_kvcacheds_threads_have_started",
        "an engine in thousands ends without it, while it starts on a busy machine",
    ),
    "elastic_memory.worker_init": held(
        "long/test_worker_setup.py::test_in_the_process_of_the_operator",
        "a set-up that fails is refused with what failed, and nothing fails here",
    ),
    "elastic_memory.socket_folder": held(
        f"{POOL}test_a_squatted_folder_is_a_refusal_of_the_worker", USERS
    ),
    "elastic_memory.socket_path": held(
        f"{POOL}test_an_engine_reads_nothing_from_a_folder_that_others_can_enter", USERS
    ),
    "elastic_memory.socket_peer": held(
        f"{POOL}test_a_worker_reads_nothing_from_another_user", USERS
    ),
    "elastic_memory.rank_memory_reply": held(
        f"{RANKS}test_a_worker_says_what_kvcached_may_map_on_its_gpu", SEVERAL_GPUS
    ),
    "elastic_memory.rank_memory": held(f"{RANKS}test_the_least_of_all_ranks_counts", SEVERAL_GPUS),
    "elastic_memory.rank_failure": held(
        f"{RANKS}test_a_map_that_failed_is_not_tried_again_at_once", SEVERAL_GPUS
    ),
    "elastic_memory.limit": held(
        f"{POOL}test_a_limit_above_what_the_engine_started_with_changes_nothing",
        "nobody moves the limit here",
    ),
    "elastic_memory.available": held(
        f"{POOL}test_pages_are_counted_when_they_change",
        "it changes no answer: what it costs is in docs/numbers.md",
    ),
    "elastic_memory.shrink": held(
        f"{POOL}test_blocks_are_counted_when_a_limit_could_be_applied", UNASKED
    ),
    "elastic_memory.eviction": held(
        "unit/test_eviction.py::test_it_looks_at_the_coldest_blocks_only",
        "it changes no answer: what it costs is in docs/numbers.md",
    ),
    "elastic_memory.reservation": held(
        f"{POOL}test_a_request_that_comes_before_block_0_waits_for_it",
        "the first request comes after block 0 was reserved",
    ),
    "elastic_memory.coordinator": held(
        "unit/test_allocation.py::test_a_pool_that_kvcached_could_not_replace_is_a_refusal",
        LAST_GUARD,
        OFFLOADING,
    ),
    "elastic_memory.kv_caches_v1": Row(
        (
            Look(
                OFFLOADING,
                ("kvcached_adapters.v1_allocation", "offloading.check_regions"),
                "the first makes what it refuses, and the second refuses it before",
            ),
        )
    ),
    "elastic_memory.kv_caches_v2": held(
        "unit/test_verify.py::test_vllms_own_views_are_checked_unless_they_are_discarded",
        LAST_GUARD,
    ),
    "elastic_memory.whole_pages": held(
        "unit/test_capacity.py::test_a_kv_cache_smaller_than_a_page_is_refused",
        "every load here fits into whole pages",
    ),
    "elastic_memory.addresses": held(
        "unit/test_capacity.py::test_a_kv_cache_larger_than_the_device_is_refused",
        "every load here is smaller than the device",
    ),
    "elastic_memory.allocation": seen(OFFLOADING, V2),
    "elastic_memory.engine_core": held(
        "unit/test_verify.py::test_an_engine_on_vllms_own_pool_does_not_start",
        LAST_GUARD,
        OFFLOADING,
    ),
    "elastic_memory.engine_name": held(
        "unit/test_claims.py::test_a_name_is_for_one_engine_and_its_process_is_named",
        "one engine in a program of its own",
        OFFLOADING,
    ),
    "elastic_memory.engine_name_end": held(
        "unit/test_claims.py::test_a_region_goes_with_its_engine",
        "the name is given back when the process ends, and it starts no other engine",
        OFFLOADING,
    ),
    "offloading.check_regions": Row(
        (
            Look(
                OFFLOADING,
                ("kvcached_adapters.v1_allocation",),
                "with that row every KV cache is kvcached's",
            ),
        ),
        "unit/test_region_memory.py::test_the_regions_that_vllm_derives_are_checked",
        LAST_GUARD,
    ),
    "offloading.copies_made": held(
        f"{FAILED}test_a_failed_copy_of_the_offloading_connector_is_named", NO_COPY_FAILS
    ),
    "offloading.copies_flushed": held(
        f"{FAILED}test_a_failed_copy_of_the_offloading_connector_is_named", NO_COPY_FAILS
    ),
    "offloading.copies_ended": held(
        f"{FAILED}test_a_failed_copy_of_the_offloading_connector_is_named", NO_COPY_FAILS
    ),
    "offloading.preempted_loads": held(
        f"{RESETS}test_without_the_row_such_a_load_ends_the_engine",
        "no load here resets the caches of running requests",
    ),
    "offloading.reset_again": held(
        f"{RESETS}test_without_the_row_a_second_reset_leaves_the_tier_as_it_was",
        "every load here steps the engine between two resets",
    ),
    "offloading.other_loads": held(
        "unit/test_offloading_legacy.py::"
        "test_blocks_that_another_connector_loads_into_are_waited_for",
        "stores here have ended before another connector loads into their blocks",
    ),
    "simple_offload.cpu_coordinator": seen(EAGER, "Simple eager, taken"),
    "simple_offload.native_pool": seen(EAGER),
    "simple_offload.register_placed": seen(EAGER, "Simple eager, non-contiguous"),
    "simple_offload.bind_gpu_block_pool": seen(LAZY),
    "simple_offload.free_blocks": seen(LAZY, CAPPED),
    "simple_offload.lazy_stores": seen(LAZY),
    "simple_offload.match": seen(LAZY),
    "simple_offload.stored": held(
        "unit/test_simple_eviction.py::test_stored_blocks_go_back_to_the_head_in_their_order",
        ORDER,
        LAZY,
    ),
    "simple_offload.copy_loop": held(
        f"{FAILED}test_the_copies_behind_one_that_failed_are_made", NO_COPY_FAILS
    ),
    "simple_offload.copies_polled": held(
        f"{FAILED}test_a_load_into_one_of_several_groups_ends_the_engine", NO_COPY_FAILS
    ),
    "simple_offload.copies_awaited": held(
        f"{FAILED}test_vllm_hears_of_the_blocks_of_a_failed_load_in_the_step_that_ends_it",
        NO_COPY_FAILS,
    ),
    "simple_offload.failed_stores": held(
        f"{FAILED}test_the_tier_does_not_offer_what_was_not_stored", NO_COPY_FAILS
    ),
    "simple_offload.failed_loads": held(
        f"{FAILED}test_vllm_hears_of_the_blocks_of_a_failed_load_in_the_step_that_ends_it",
        NO_COPY_FAILS,
    ),
    "simple_offload.reports": held(
        f"{FAILED}test_the_tier_does_not_offer_what_was_not_stored", NO_COPY_FAILS
    ),
    "simple_offload.not_stored": held(
        f"{FAILED}test_the_tier_does_not_offer_what_was_not_stored", NO_COPY_FAILS
    ),
    "simple_offload.pending_work": held(
        "unit/test_simple_lifetime.py::test_an_idle_engine_steps_while_a_copy_or_a_trim_is_to_come",
        STEPPED,
        "simple, held copies",
    ),
    "simple_offload.shutdown": seen("Simple eager, shutdown"),
    "simple_offload.simple_plan": held(
        f"{TELEMETRY}test_what_the_simple_connector_plans_is_counted", SERIES
    ),
    "fence.install": seen(OFFLOADING, LATE, HELD),
    "fence.build": seen(LATE, HELD),
    "fence.worker_output": seen(LATE, HELD),
    "fence.pending_work": held(
        "unit/test_fence_hooks.py::test_the_engine_steps_as_long_as_a_page_is_held",
        STEPPED,
        "given back",
        HELD,
    ),
    "fence.release": seen(LATE, HELD),
    "fence.step": seen(HELD),
    "fence.reset": held(
        "unit/test_fence_hooks.py::"
        "test_a_reset_steps_an_engine_that_nobody_steps_until_no_page_is_held",
        STEPPED,
        HELD,
    ),
    "fence.window_blocks_of_reset": held(
        "engine/test_resets.py::test_what_a_window_left_is_not_stored_after_a_reset",
        "no load here resets the tier while requests run",
    ),
    "fence.listener": held(
        "unit/test_fence_hooks.py::test_the_wait_for_every_copy_is_left_out_only_with_a_connector",
        "costs time alone: the worker would wait longer than it must",
        "given back",
    ),
    "deadlock.schedule": seen("standstill"),
    "kv_events.switch": seen("events"),
    "kv_events.take": seen("events"),
    "kv_events.remove": seen("events"),
    "kv_events.reset": seen("events"),
    "data_parallel.name": held(
        "unit/test_data_parallel.py::test_each_rank_and_its_workers_have_a_name_of_their_own",
        "one engine, which is in the process that asks for it",
    ),
    "secondary_tiers.shared_memory": held(
        f"{CLASSES}test_a_second_engine_with_the_same_engine_id_is_refused",
        "one engine on the machine has this name",
        TIERS,
    ),
    "secondary_tiers.shared_region": held(
        "unit/test_claims.py::test_a_region_that_another_user_made_is_not_opened",
        f"{USERS}; nobody removes its name",
    ),
    "secondary_tiers.describe": seen(TIERS),
    "secondary_tiers.worker_calls": held(
        f"{WEIGHTS}test_every_way_to_the_workers_from_outside_is_watched",
        "nobody replaces the weights here; the engine of "
        "`test_without_a_reset_nothing_of_the_new_weights_is_stored_as_of_the_old` does",
    ),
    "secondary_tiers.wake_up": held(
        f"{WEIGHTS}test_every_way_to_the_workers_from_outside_is_watched", "a CPU has no sleep mode"
    ),
    "secondary_tiers.reset_caches": held(
        f"{WEIGHTS}test_a_reset_after_the_weights_were_replaced_is_as_good",
        "nobody replaces the weights here",
    ),
    "secondary_tiers.file_mapper": held(
        f"{CLASSES}test_without_the_row_layouts_and_numbers_of_ranks_share_a_folder",
        "needs a second engine with another layout on the same disk",
        TIERS,
    ),
    "secondary_tiers.store_blocks": seen(TIERS),
    "secondary_tiers.load_blocks": held(
        f"{CLASSES}test_without_the_checksum_a_damaged_file_is_served",
        "needs a damaged file",
        TIERS,
    ),
    "secondary_tiers.tier_class": held(
        f"{CLASSES}test_a_disk_that_hangs_when_asked_for_files_is_passed_over",
        "needs a disk that does not answer",
        TIERS,
    ),
    "secondary_tiers.lookup": held(
        f"{CLASSES}test_without_the_rows_a_disk_that_hangs_stalls_the_request",
        "needs a disk that does not answer",
    ),
    "secondary_tiers.promotion": held(
        f"{CLASSES}test_without_the_row_a_prompt_larger_than_the_cpu_tier_gets_nothing",
        "needs a prompt larger than the CPU tier",
    ),
    "secondary_tiers.matched_tokens": held(
        "unit/test_tier_rules.py::"
        "test_no_load_starts_behind_a_request_that_waits_until_the_next_step",
        "needs requests that wait for a tier and for each other's memory",
    ),
    "secondary_tiers.build": held(
        "unit/test_tier_rules.py::"
        "test_no_load_starts_behind_a_request_that_waits_until_the_next_step",
        "as secondary_tiers.matched_tokens, whose record it ends",
    ),
    "secondary_tiers.reset": held(
        f"{CLASSES}test_without_the_row_an_older_copy_overwrites_what_was_promoted",
        "needs a reset while copies are in flight, and a disk that is faster than they are",
    ),
    "first_limit.engine": held(
        "unit/test_demand.py::test_an_engine_is_limited_before_it_has_requests",
        "no load here asks for a first limit",
    ),
    "suspend.engine": held(
        f"{SUSPEND}test_its_pages_are_free_and_it_answers_the_same_afterwards", UNASKED
    ),
    "suspend.engine_end": held(
        f"{HOOKS}test_at_its_end_it_listens_no_longer",
        "the socket would stay until the next engine removes it: changes no answer and no memory",
    ),
    "suspend.question": held(
        f"{SUSPEND}test_its_pages_are_free_and_it_answers_the_same_afterwards", UNASKED
    ),
    "suspend.step": held(
        f"{SUSPEND}test_its_pages_are_free_and_it_answers_the_same_afterwards", UNASKED
    ),
    "suspend.has_requests": held(
        f"{SUSPEND}test_its_pages_are_free_and_it_answers_the_same_afterwards", UNASKED
    ),
    "suspend.pause_state": held(
        "unit/test_suspension.py::test_vllms_own_resume_does_not_run_a_suspended_engine", UNASKED
    ),
    "suspend.limit": held(
        f"{SUSPEND}test_a_lower_limit_gives_pages_back_and_loses_nothing", UNASKED
    ),
    "suspend.revision": held(
        "unit/test_giving.py::test_a_limit_by_revision_is_refused",
        "no load here sets a limit by revision",
    ),
    "suspend.offloading_stores": held(
        "engine/test_spill.py::test_offloading_stores_what_fits_and_forgets_the_store", UNASKED
    ),
    "suspend.simple_stores": held(
        "engine/test_spill.py::"
        "test_simple_stores_what_fits_and_evicts_nothing_that_the_spill_needs",
        UNASKED,
    ),
    "sleep.sleep": held(f"{SLEEP}test_level_1_gives_every_page_back_and_loses_nothing", AWAKE),
    "sleep.release": held(
        f"{SLEEP}test_released_kv_memory_is_the_devices_again_and_no_cache_is_kept", AWAKE
    ),
    "sleep.reset": held(f"{SLEEP}test_level_1_gives_every_page_back_and_loses_nothing", AWAKE),
    "sleep.step": held(f"{SLEEP}test_level_1_gives_every_page_back_and_loses_nothing", AWAKE),
    "sleep.calls": held(f"{SLEEP}test_other_weights_find_no_block_that_a_sleep_kept", AWAKE),
    "sleep.wake_up": held(f"{SLEEP}test_level_1_gives_every_page_back_and_loses_nothing", AWAKE),
    "host_device_sleep.available": held(
        f"{SLEEP}test_level_1_gives_every_page_back_and_loses_nothing", AWAKE
    ),
    "host_device_sleep.weights_leave": held(
        "unit/test_sleep.py::test_weights_that_left_are_no_numbers_and_come_back",
        "weights that stay make no difference: nothing is computed while an engine sleeps",
    ),
    "host_device_sleep.weights_return": held(
        f"{SLEEP}test_level_1_gives_every_page_back_and_loses_nothing", AWAKE
    ),
    "host_device_sleep.nothing_discarded": held(
        f"{SLEEP}test_released_kv_memory_is_the_devices_again_and_no_cache_is_kept", AWAKE
    ),
    "debug.worker": seen("debug, corrupt"),
    "debug.store": Row((Look("debug", ("fence.release",), WHOLE),)),
    "debug.load": seen("debug, corrupt"),
    "debug.promotions": seen("tiering fs, debug"),
    "debug.build": seen("tiering fs, debug"),
    "debug.simple": held(
        "unit/test_debug.py::test_simple_a_load_that_brings_other_bytes",
        WHOLE,
        "Simple eager, debug",
    ),
    "debug.install": Row((Look("debug", ("fence.release",), WHOLE),)),
    "metrics.engine_core": held(f"{TELEMETRY}test_an_engine_goes_on_publishing", SERIES),
    "metrics.make_stats": held(f"{TELEMETRY}test_what_the_connector_reports_is_counted", SERIES),
    "metrics.step": held(
        f"{TELEMETRY}test_a_busy_engine_sends_now_and_then_and_one_at_rest_at_once", SERIES
    ),
    "metrics.step_with_batch_queue": held(
        f"{TELEMETRY}test_a_busy_engine_sends_now_and_then_and_one_at_rest_at_once", SERIES
    ),
    "metrics.schedule": held(
        f"{LOOKUPS}test_what_was_computed_before_and_was_not_found_is_lost", SERIES
    ),
    "metrics.reset": held(f"{LOOKUPS}test_what_was_reset_was_not_lost", SERIES),
    "metrics.reset_connector": held(f"{LOOKUPS}test_what_was_reset_was_not_lost", SERIES),
    "metrics.prometheus": held(
        f"{TELEMETRY}test_an_api_server_without_the_series_starts_and_keeps_them_from_the_connector",
        SERIES,
    ),
    "metrics.prometheus_observe": held(
        f"{TELEMETRY}test_the_connector_never_sees_our_part", SERIES
    ),
    "metrics.client_shutdown": held(
        "unit/test_engines.py::test_an_engine_that_died_is_told_from_one_that_was_stopped", SERIES
    ),
    "metrics.log": held(f"{TELEMETRY}test_the_connector_never_sees_our_part", SERIES),
}

# Rows of the host pool are on only where one is asked for, and hang together.
_POOL_CLASSES, _POOL_ENGINES = "engine/test_host_pool_classes.py::", "long/test_host_pool.py::"
_POOL_SIMPLE = "engine/test_host_pool_simple_classes.py::"
_POOL_TESTS = {
    f"{_POOL_CLASSES}test_after_a_reset_the_memory_is_back_but_for_one_extent": (
        "reset_tier",
        "free",
    ),
    f"{_POOL_CLASSES}test_a_tier_begins_with_nothing_and_without_a_name": (
        *("region", "populate", "pin", "free_count"),
    ),
    f"{_POOL_CLASSES}test_vllms_workers_copy_into_extents_and_out_of_them": ("cleanup",),
    f"{_POOL_CLASSES}test_what_is_stored_is_loaded_and_evicted_by_vllms_policy": (
        *("allocate", "prepare_store"),
    ),
    f"{_POOL_CLASSES}test_the_coldest_blocks_go_for_another_engine_and_routers_hear_of_it": (
        *("events", "touch"),
    ),
    f"{_POOL_CLASSES}test_blocks_in_transfers_stay_until_they_end": (
        *("prepare_load", "complete_load", "complete_store"),
    ),
    "engine/test_host_pool_tier_classes.py::test_what_a_disk_stores_from_stays_until_it_has": (
        "lookup",
    ),
    f"{_POOL_ENGINES}test_an_idle_engine_makes_room_and_a_killed_one_leaves_it": (
        "engine_core",
        "shutdown",
    ),
    f"{_POOL_ENGINES}test_memory_is_committed_on_use_and_given_back": (
        *("reset", "schedule", "build", "worker_output", "pending_work", "simple_tensors"),
    ),
    f"{_POOL_SIMPLE}test_a_connector_that_shuts_down_deregisters_all": ("simple_shutdown",),
    f"{_POOL_SIMPLE}test_a_reset_gives_all_of_it_back": ("simple_reset",),
    f"{_POOL_SIMPLE}test_blocks_without_memory_are_not_shown_as_used": ("simple_stats",),
    f"{_POOL_SIMPLE}test_nothing_is_evicted_while_vllm_looks": ("update", "finish"),
}
ROWS |= {
    f"host_pool.{name}": held(test, POOL_OFF)
    for test, names in _POOL_TESTS.items()
    for name in names
}

# Rows that neither an engine nor a test has shown yet; see ``scripts/matrix without --missing``.
OPEN = frozenset(
    (
        "host_device.device_name",
        "host_device.listener_device",
        "host_device.sync_before_unmap",
        "host_device.release_barrier",
    )
)
