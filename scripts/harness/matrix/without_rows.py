"""Which engines show what a row of the newest release is for, and which test does where none can.

A row that more than one connector, layout or runner brings has a look for each in which something
else could be seen. A test is there for what no engine of ``LOADS`` comes to: several GPUs or
ranks, other users of the machine, damaged files, a metric.
"""

from typing import NamedTuple

from harness.matrix.without import Look


class Row(NamedTuple):
    """How the need of a row is shown.

    Attributes:
        test: a function under tests/, which fails without it.
        why: why no engine here shows it; empty where one does.
    """

    looks: tuple[Look, ...] = ()
    test: str = ""
    why: str = ""


Ids = str | tuple[str, ...]


def of(feature: str, *names: str) -> tuple[str, ...]:
    """Return the ids of rows of a feature."""
    return tuple(f"{feature}.{name}" for name in names)


OFFLOADING, V2, EXHAUSTED = "Offloading", "Offloading, Runner V2", "Offloading, exhausted"
LATENT, HELD, LATE = "Offloading, latent attention", "held copies", "late store"
EAGER, LAZY, CAPPED, TIERS = "Simple eager", "Simple lazy", "Simple lazy, capped", "tiering fs"
_THREAD = (
    "vLLM's CPU platform selects a device as well, which does nothing: the test is of the "
    "thread, and passes without this row"
)
_OTHER_WEIGHTS = (
    "nobody replaces the weights here; the engine of "
    "`test_without_a_reset_nothing_of_the_new_weights_is_stored_as_of_the_old` does"
)
# The loads under which engines are started without rows.
_LOADS: dict[tuple[str, ...], Ids] = {
    (OFFLOADING, V2): (
        *of("kvcached_version", "runner_v2"),
        *of("host_device", "device_name", "listener_device"),
        *of("elastic_memory", "allocation"),
    ),
    (OFFLOADING,): (
        *of("kvcached_version", "block_pool", "engine_core"),
        *of("host_device", "torch", "layouts"),
        *of("host_copies", "copy_torch", "copy_blocks", "copy_platform", "copy_pinned"),
        *of("host_copies", "copy_spec", "copy_register", "copy_register_platform", "copy_device"),
        *of("kvcached_adapters", "v1_worker", "v1_profiling", "v1_allocation"),
        *of("elastic_memory", "coordinator", "engine_core", "engine_name", "engine_name_end"),
    ),
    (OFFLOADING, EXHAUSTED): "kvcached_version.coordinator",
    (EXHAUSTED,): "kvcached_version.allocate_slots",
    (OFFLOADING, HELD): "host_device.sync_before_unmap",
    (OFFLOADING, LATE): "host_device.release_barrier",
    (V2,): "host_device.size_for_v2",
    (LATENT,): of(
        "host_device", "latent_caching", "latent_write", "latent_decode", "latent_gather"
    ),
    (EAGER,): (
        *of("host_copies", "simple_torch", "simple_pinned", "simple_register"),
        *of("host_copies", "simple_memcpy", "simple_events", "simple_device"),
        *of("simple_offload", "native_pool"),
    ),
    (OFFLOADING, "events"): "kvcached_adapters.pool_attributes",
    ("tiering fs, priority",): "elastic_memory.config",
    (EAGER, "Simple eager, taken"): "simple_offload.cpu_coordinator",
    (EAGER, "Simple eager, non-contiguous"): "simple_offload.register_placed",
    (LAZY,): of("simple_offload", "bind_gpu_block_pool", "lazy_stores", "match", "stored"),
    (LAZY, CAPPED): "simple_offload.free_blocks",
    ("simple, held copies",): "simple_offload.pending_work",
    ("Simple eager, shutdown",): "simple_offload.shutdown",
    (OFFLOADING, LATE, HELD): "fence.install",
    (LATE, HELD): of("fence", "build", "worker_output", "release"),
    ("given back", HELD): "fence.pending_work",
    (HELD,): of("fence", "step", "reset"),
    ("given back",): "fence.listener",
    ("standstill",): "deadlock.schedule",
    ("events",): of("kv_events", "switch", "take", "remove", "reset"),
    (TIERS,): (
        *of("secondary_tiers", "shared_memory", "describe", "file_mapper", "store_blocks"),
        *of("secondary_tiers", "load_blocks", "tier_class"),
    ),
    ("debug, corrupt",): of("debug", "worker", "load"),
    ("tiering fs, debug",): of("debug", "promotions", "build"),
    ("Simple eager, debug",): "debug.simple",
}
# Why no engine here shows rows, and the tests that fail without them.
_TESTS: dict[str, dict[str, Ids]] = {
    "no load here asks for a host pool; the tests have all rows of it or none": {
        "test_after_a_reset_the_memory_is_back_but_for_one_extent": of(
            "host_pool", "reset_tier", "free"
        ),
        "test_a_tier_begins_with_nothing_and_without_a_name": of(
            "host_pool", "region", "populate", "pin", "free_count"
        ),
        "test_vllms_workers_copy_into_extents_and_out_of_them": "host_pool.cleanup",
        "test_what_is_stored_is_loaded_and_evicted_by_vllms_policy": of(
            "host_pool", "allocate", "prepare_store"
        ),
        "test_the_coldest_blocks_go_for_another_engine_and_routers_hear_of_it": of(
            "host_pool", "events", "touch"
        ),
        "test_blocks_in_transfers_stay_until_they_end": of(
            "host_pool", "prepare_load", "complete_load", "complete_store"
        ),
        "test_what_a_disk_stores_from_stays_until_it_has": "host_pool.lookup",
        "test_an_idle_engine_makes_room_and_a_killed_one_leaves_it": of(
            "host_pool", "engine_core", "shutdown"
        ),
        "test_memory_is_committed_on_use_and_given_back": of(
            "host_pool",
            "reset",
            "schedule",
            "build",
            "worker_output",
            "pending_work",
            "simple_tensors",
        ),
        "test_a_connector_that_shuts_down_deregisters_all": "host_pool.simple_shutdown",
        "test_a_reset_gives_all_of_it_back": "host_pool.simple_reset",
        "test_blocks_without_memory_are_not_shown_as_used": "host_pool.simple_stats",
        "test_nothing_is_evicted_while_vllm_looks": of("host_pool", "update", "finish"),
    },
    "changes no answer and no memory: what is counted is not shown": {
        "test_what_the_simple_connector_plans_is_counted": "simple_offload.simple_plan",
        "test_an_engine_goes_on_publishing": "metrics.engine_core",
        "test_what_the_connector_reports_is_counted": "metrics.make_stats",
        "test_a_busy_engine_sends_now_and_then_and_one_at_rest_at_once": of(
            "metrics", "step", "step_with_batch_queue"
        ),
        "test_what_was_computed_before_and_was_not_found_is_lost": "metrics.schedule",
        "test_what_was_reset_was_not_lost": of("metrics", "reset", "reset_connector"),
        "test_an_api_server_without_the_series_starts_and_keeps_them_from_the_connector": of(
            "metrics", "prometheus"
        ),
        "test_the_connector_never_sees_our_part": of("metrics", "prometheus_observe", "log"),
        "test_an_engine_that_died_is_told_from_one_that_was_stopped": "metrics.client_shutdown",
    },
    "needs an NPU, or the emulated one, which has no cells": {
        "test_kvcached_reads_the_npus_memory_as_cudas": "ascend.torch",
        "test_kvcached_knows_an_npu_by_the_name_of_cuda": "ascend.device_name",
        "test_the_listener_selects_no_cuda_device": "ascend.listener_device",
        "test_the_whole_npu_is_waited_for_before_an_unmap": "ascend.sync_before_unmap",
        "test_the_barrier_waits_for_the_workers_npu_and_is_pickled_by_name": of(
            "ascend", "release_barrier"
        ),
        "test_the_kv_cache_is_allocated_by_kvcached": of("ascend", "allocation", "halves"),
        "test_a_kv_cache_that_is_not_kvcacheds_is_seen": "ascend.kv_cache_tensors",
        "test_kvcacheds_listener_ends_with_the_worker": "ascend.worker_shutdown",
        "test_without_the_row_v_is_lost_without_an_error": "ascend.register_kv_caches",
    },
    "no load here suspends an engine or lowers its limit": {
        "test_blocks_are_counted_when_a_limit_could_be_applied": "elastic_memory.shrink",
        "test_its_pages_are_free_and_it_answers_the_same_afterwards": of(
            "suspend", "engine", "question", "step", "has_requests"
        ),
        "test_vllms_own_resume_does_not_run_a_suspended_engine": "suspend.pause_state",
        "test_a_lower_limit_gives_pages_back_and_loses_nothing": "suspend.limit",
        "test_offloading_stores_what_fits_and_forgets_the_store": "suspend.offloading_stores",
        "test_simple_stores_what_fits_and_evicts_nothing_that_the_spill_needs": of(
            "suspend", "simple_stores"
        ),
    },
    "no copy fails here": {
        "test_a_failed_copy_of_the_offloading_connector_is_named": of(
            "offloading", "copies_made", "copies_flushed", "copies_ended"
        ),
        "test_the_copies_behind_one_that_failed_are_made": "simple_offload.copy_loop",
        "test_a_load_into_one_of_several_groups_ends_the_engine": "simple_offload.copies_polled",
        "test_vllm_hears_of_the_blocks_of_a_failed_load_in_the_step_that_ends_it": of(
            "simple_offload", "copies_awaited", "failed_loads"
        ),
        "test_the_tier_does_not_offer_what_was_not_stored": of(
            "simple_offload", "failed_stores", "reports", "not_stored"
        ),
    },
    "a guard behind others: nothing here gets past those": {
        "test_a_pool_that_kvcached_could_not_replace_is_a_refusal": "elastic_memory.coordinator",
        "test_vllms_own_views_are_checked_unless_they_are_discarded": "elastic_memory.kv_caches_v2",
        "test_an_engine_on_vllms_own_pool_does_not_start": "elastic_memory.engine_core",
        "test_the_regions_that_vllm_derives_are_checked": "offloading.check_regions",
    },
    "needs another user on the machine": {
        "test_a_squatted_folder_is_a_refusal_of_the_worker": "elastic_memory.socket_folder",
        "test_an_engine_reads_nothing_from_a_folder_that_others_can_enter": of(
            "elastic_memory", "socket_path"
        ),
        "test_a_worker_reads_nothing_from_another_user": "elastic_memory.socket_peer",
    },
    "needs several GPUs, of which one is full": {
        "test_a_worker_says_what_kvcached_may_map_on_its_gpu": "elastic_memory.rank_memory_reply",
        "test_the_least_of_all_ranks_counts": "elastic_memory.rank_memory",
        "test_a_map_that_failed_is_not_tried_again_at_once": "elastic_memory.rank_failure",
    },
    "the driver steps an engine until it is at rest, where a served one sleeps": {
        "test_an_idle_engine_steps_while_a_copy_or_a_trim_is_to_come": of(
            "simple_offload", "pending_work"
        ),
        "test_the_engine_steps_as_long_as_a_page_is_held": "fence.pending_work",
        "test_a_reset_steps_an_engine_that_nobody_steps_until_no_page_is_held": "fence.reset",
    },
    "no load here lets an engine sleep": {
        "test_level_1_gives_every_page_back_and_loses_nothing": (
            *of("sleep", "sleep", "reset", "step", "wake_up"),
            *of("host_device_sleep", "available", "weights_return"),
        ),
        "test_released_kv_memory_is_the_devices_again_and_no_cache_is_kept": (
            *of("sleep", "release"),
            *of("host_device_sleep", "nothing_discarded"),
        ),
        "test_other_weights_find_no_block_that_a_sleep_kept": "sleep.calls",
    },
    "memory that is not registered is copied all the same": {
        "test_the_shared_region_is_registered_and_deregistered_and_leaves_no_file": of(
            "host_copies", "copy_pinned", "copy_register", "copy_register_platform"
        ),
        "test_the_simple_connectors_tier_is_registered_as_strictly": "host_copies.simple_pinned",
    },
    "a CPU's worker does not run it": {
        "test_weights_held_elsewhere_are_taken_off_the_budget": "kvcached_adapters.request_memory",
        "test_the_profile_runs_in_what_vllm_puts_around_it": "kvcached_adapters.profiling",
    },
    "it changes no answer: what it costs is in scripts/bench steps": {
        "test_pages_are_counted_when_they_change": "elastic_memory.available",
        "test_it_looks_at_the_coldest_blocks_only": "elastic_memory.eviction",
    },
    "needs a disk that does not answer": {
        "test_a_disk_that_hangs_when_asked_for_files_is_passed_over": "secondary_tiers.tier_class",
        "test_without_the_rows_a_disk_that_hangs_stalls_the_request": "secondary_tiers.lookup",
    },
    "with one size of block the layouts of 0.30 give the same numbers": {
        "test_kvcached_is_told_a_release_for_one_decision": "kvcached_version.coordinator"
    },
    "vLLM 0.32's own kernel attends to the same rows; the test passes without this row": {
        "test_a_token_attends_to_its_own_context": "host_device.latent_decode"
    },
    _THREAD: {
        "test_vllms_simple_backend_copies_there_and_back_behind_what_it_waits_for": of(
            "host_copies", "simple_device"
        )
    },
    "plain vLLM 0.32 ends on a CPU with a model that has Mamba layers": {
        "test_a_boundary_that_was_passed_is_not_named": "kvcached_adapters.partial_tail"
    },
    "an engine in thousands ends without it, while it starts on a busy machine": {
        "test_an_engine_adds_no_variable_after_kvcacheds_threads_have_started": of(
            "elastic_memory", "environment"
        )
    },
    "a set-up that fails is refused with what failed, and nothing fails here": {
        "test_in_the_process_of_the_operator": "elastic_memory.worker_init"
    },
    "nobody moves the limit here": {
        "test_a_limit_above_what_the_engine_started_with_changes_nothing": "elastic_memory.limit"
    },
    "the first request comes after block 0 was reserved": {
        "test_a_request_that_comes_before_block_0_waits_for_it": "elastic_memory.reservation"
    },
    "every load here fits into whole pages": {
        "test_a_kv_cache_smaller_than_a_page_is_refused": "elastic_memory.whole_pages"
    },
    "the stages of every pipeline here have the same layers": {
        "test_stages_of_other_layers_are_refused": "elastic_memory.stages"
    },
    "every load here is smaller than the device": {
        "test_a_kv_cache_larger_than_the_device_is_refused": "elastic_memory.addresses"
    },
    "one engine in a program of its own": {
        "test_a_name_is_for_one_engine_and_its_process_is_named": "elastic_memory.engine_name"
    },
    "the name is given back when the process ends, and it starts no other engine": {
        "test_a_region_goes_with_its_engine": "elastic_memory.engine_name_end"
    },
    "no load here resets the caches of running requests": {
        "test_without_the_row_such_a_load_ends_the_engine": "offloading.preempted_loads"
    },
    "every load here steps the engine between two resets": {
        "test_without_the_row_a_second_reset_leaves_the_tier_as_it_was": "offloading.reset_again"
    },
    "stores here have ended before another connector loads into their blocks": {
        "test_blocks_that_another_connector_loads_into_are_waited_for": "offloading.other_loads"
    },
    "which of two stored blocks is evicted first changes no answer and no count": {
        "test_stored_blocks_go_back_to_the_head_in_their_order": "simple_offload.stored"
    },
    "no load here resets the tier while requests run": {
        "test_what_a_window_left_is_not_stored_after_a_reset": "fence.window_blocks_of_reset"
    },
    "costs time alone: the worker would wait longer than it must": {
        "test_the_wait_for_every_copy_is_left_out_only_with_a_connector": "fence.listener"
    },
    "one engine, which is in the process that asks for it": {
        "test_each_rank_and_its_workers_have_a_name_of_their_own": "data_parallel.name"
    },
    "one engine on the machine has this name": {
        "test_a_second_engine_with_the_same_engine_id_is_refused": "secondary_tiers.shared_memory"
    },
    "needs another user on the machine; nobody removes its name": {
        "test_a_region_that_another_user_made_is_a_refusal_that_names_him": of(
            "secondary_tiers", "shared_region"
        ),
    },
    _OTHER_WEIGHTS: {
        "test_every_way_to_the_workers_from_outside_is_watched": "secondary_tiers.worker_calls"
    },
    "a CPU has no sleep mode": {
        "test_every_way_to_the_workers_from_outside_is_watched": "secondary_tiers.wake_up"
    },
    "nobody replaces the weights here": {
        "test_a_reset_after_the_weights_were_replaced_is_as_good": "secondary_tiers.reset_caches"
    },
    "needs a second engine with another layout on the same disk": {
        "test_without_the_row_layouts_and_numbers_of_ranks_share_a_folder": of(
            "secondary_tiers", "file_mapper"
        )
    },
    "needs a damaged file": {
        "test_without_the_checksum_a_damaged_file_is_served": "secondary_tiers.load_blocks"
    },
    "needs a prompt larger than the CPU tier": {
        "test_without_the_row_a_prompt_larger_than_the_cpu_tier_gets_nothing": of(
            "secondary_tiers", "promotion"
        )
    },
    "needs requests that wait for a tier and for each other's memory": {
        "test_no_load_starts_behind_a_request_that_waits_until_the_next_step": of(
            "secondary_tiers", "matched_tokens"
        )
    },
    "as secondary_tiers.matched_tokens, whose record it ends": {
        "test_no_load_starts_behind_a_request_that_waits_until_the_next_step": of(
            "secondary_tiers", "build"
        )
    },
    "needs a reset while copies are in flight, and a disk that is faster than they are": {
        "test_without_the_row_an_older_copy_overwrites_what_was_promoted": "secondary_tiers.reset"
    },
    "no load here asks for a first limit": {
        "test_an_engine_is_limited_before_it_has_requests": "first_limit.engine"
    },
    "the socket would stay until the next engine removes it: changes no answer and no memory": {
        "test_at_its_end_it_listens_no_longer": "suspend.engine_end"
    },
    "no load here sets a limit by revision": {
        "test_a_limit_by_revision_is_refused": "suspend.revision"
    },
    "weights that stay make no difference: nothing is computed while an engine sleeps": {
        "test_weights_that_left_are_no_numbers_and_come_back": "host_device_sleep.weights_leave"
    },
    "debug mode has nothing to find while every other row is there": {
        "test_simple_a_load_that_brings_other_bytes": "debug.simple"
    },
}

_WHOLE = "debug mode has nothing to find while every other row is there"
# Rows that others stand before, which are taken out of both engines.
_BEHIND = {
    "elastic_memory.kv_caches_v1": Look(
        OFFLOADING,
        ("kvcached_adapters.v1_allocation", "offloading.check_regions"),
        "the first makes what it refuses, and the second refuses it before",
    ),
    "offloading.check_regions": Look(
        OFFLOADING,
        ("kvcached_adapters.v1_allocation",),
        "with that row every KV cache is kvcached's",
    ),
    "debug.store": Look("debug", ("fence.release",), _WHOLE),
    "debug.install": Look("debug", ("fence.release",), _WHOLE),
}


def _by_row() -> dict[str, Row]:
    found = {row: Row((look,)) for row, look in _BEHIND.items()}
    for loads, ids in _LOADS.items():
        found |= {row: Row(tuple(map(Look, loads))) for row in _each(ids)}
    for why, tests in _TESTS.items():
        for test, ids in tests.items():
            found |= {row: Row(found.get(row, Row()).looks, test, why) for row in _each(ids)}
    return found


def _each(ids: Ids) -> tuple[str, ...]:
    return (ids,) if isinstance(ids, str) else ids


ROWS = _by_row()
# Rows that neither an engine nor a test has shown yet; see ``scripts/matrix without --missing``.
OPEN = frozenset(
    of("host_device", "device_name", "listener_device", "sync_before_unmap", "release_barrier")
)
