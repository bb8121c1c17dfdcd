"""Secondary tiers up to vLLM 0.32: faults that later releases have fixed."""

from __future__ import annotations

from typing import Any

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.patches.secondary_tiers.promotion import Promoted
from kvpatch.telemetry.counters import Totals


def hold_promotions(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let promotions wait for the copies that were in flight when the CPU tier was reset.

    A reset frees the chunks of all copies, and the workers wait for these only in the step that is
    being built. vLLM forgets them; the fence counts each until every worker has reported it.
    """
    fenced = state.find(instance, Fenced)
    manager = instance.manager
    waiting = getattr(manager, "_pending_load_submissions", None)  # without tiers there are none
    if fenced is None or not waiting or not _older_than_reset(fenced, instance):
        return wrapped(*args, **kwargs)
    manager._pending_load_submissions = {}
    try:
        return wrapped(*args, **kwargs)
    finally:
        manager._pending_load_submissions = waiting


def _older_than_reset(fenced: Fenced, planner: Any) -> bool:
    return any(job < planner._stale_job_threshold for job in fenced.fence.transfers)


def count_disk_hits(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Count the tokens that a request loads of promoted blocks, before vLLM counts the hit."""
    result = wrapped(*args, **kwargs)
    totals = state.find(instance, Totals)
    if totals is None or totals.fuse.off:
        return result
    with totals.fuse:
        request = argument(args, kwargs, 0, "request")
        tokens = int(argument(args, kwargs, 2, "num_external_tokens"))
        if tokens and not request.num_preemptions:  # of which vLLM keeps a count of its own
            totals.from_disk += _promoted(instance, request, tokens)
    return result


def _promoted(planner: Any, request: Any, tokens: int) -> int:
    status = planner._req_status[request.request_id]
    promoted = state.find(status.req_context, Promoted)
    if promoted is None:
        return 0
    begin, most = status.num_locally_computed_tokens, 0
    for config, group in zip(planner.config.kv_group_configs, status.group_states, strict=False):
        # The latter up to 0.25.
        size = getattr(config, "tokens_per_chunk", None) or config.offloaded_block_size
        keys = group.offload_keys[begin // size : -(-(begin + tokens) // size)]
        most = max(most, size * sum(key in promoted.keys for key in keys))
    return min(tokens, most)
