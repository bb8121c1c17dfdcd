"""Tokens that are computed again: what a tier that never evicts a block would have served.

vLLM counts what its caches had. What they had no more is told from the hashes of the blocks that
the engine has computed: of a new request, the blocks at the beginning of its prompt that are
among them, less those that it found.
"""

from __future__ import annotations

from typing import Any

from kvpatch import state
from kvpatch.telemetry.counters import Totals
from kvpatch.telemetry.remembered import Remembered


class Computed:
    """The blocks of ended requests, and the requests that run; kept on the ``Scheduler``."""

    def __init__(self) -> None:
        self.blocks = Remembered()
        self.running: dict[str, Any] = {}


def around_schedule(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Look at the requests that begin in this step, and at those that have ended before it."""
    output = wrapped(*args, **kwargs)
    totals = state.find(instance, Totals)
    if totals is None or totals.fuse.off:
        return output
    with totals.fuse:
        totals.scheduled(output.num_scheduled_tokens.values())
        if output.finished_req_ids or output.scheduled_new_reqs:
            _look(instance, totals, output)
    return output


def _look(scheduler: Any, totals: Totals, output: Any) -> None:
    computed = state.of(scheduler, Computed)
    tokens = int(scheduler.kv_cache_manager.block_pool.hash_block_size)
    for request_id in output.finished_req_ids:
        ended = computed.running.pop(request_id, None)
        if ended is not None:  # and not aborted before it ran
            computed.blocks.add(ended.block_hashes[: ended.num_computed_tokens // tokens])
    for begun in output.scheduled_new_reqs:
        request = scheduler.requests.get(begun.req_id)
        if request is None or begun.req_id in computed.running:
            continue
        computed.running[begun.req_id] = request
        # One that asks for what has to be computed loses nothing, and one that was preempted
        # was counted when it began.
        if request.skip_reading_prefix_cache or request.num_preemptions:
            continue
        # vLLM always computes the last token.
        prompt = request.block_hashes[: (request.num_tokens - 1) // tokens]
        could = computed.blocks.prefix(prompt) * tokens
        totals.lost_tokens += max(0, could - begun.num_computed_tokens)


def around_reset_connector(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Forget what was computed: somebody wants it gone, as after an update of the weights."""
    result = wrapped(*args, **kwargs)
    _forget(instance)
    return result


def around_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Forget what was computed, if no connector has it still."""
    result = wrapped(*args, **kwargs)
    if instance.connector is None:
        _forget(instance)
    return result


def _forget(scheduler: Any) -> None:
    computed = state.find(scheduler, Computed)
    if computed is not None:
        computed.blocks.forget()
        # Their blocks are of before as well.
        computed.running.clear()
