"""OffloadingConnector up to vLLM 0.32: faults that later releases have fixed."""

from __future__ import annotations

from typing import Any

from kvpatch.patch import argument
from kvpatch.upstream import connectors


def around_offloadable(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> int:
    """Leave the last sampled token of a finished request out of what can be stored.

    A step that never comes would write its place in a block; a rejected draft may be there.
    """
    request = argument(args, kwargs, 0, "req_status").req
    tokens = int(wrapped(*args, **kwargs))
    computed = int(max(request.num_prompt_tokens, request.num_tokens - 1))
    return min(tokens, computed) if request.is_finished() else tokens


def before_session(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Forget the hashes of tokens that a session drops before it goes on.

    vLLM drops the tokens that were not computed, and hashes only what comes behind the hashes that
    there are. A token completes at most one block, and those that are kept are hashed again.
    """
    session = argument(args, kwargs, 0, "session")
    dropped = session.num_tokens - session.num_computed_tokens
    if dropped > 0:
        del session.block_hashes[-dropped:]
    return wrapped(*args, **kwargs)


def around_other_loads(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let the workers wait for stores of blocks that another connector loads into.

    Blocks of a finished request go while they are stored, and their next owner is known by the
    tokens of a step, of which a request that waits for a load has none.
    """
    result = wrapped(*args, **kwargs)
    planner = connectors.scheduler_of(instance)
    if planner is not None and argument(args, kwargs, 2, "num_external_tokens"):
        blocks = argument(args, kwargs, 1, "blocks").blocks
        new = {
            one.block_id
            for group in blocks
            for one in group
            if one.block_hash is None and not one.is_null  # others are hits, whose bytes stay
        }
        waiting = planner._block_id_to_pending_jobs
        jobs = set().union(*(waiting.get(block, ()) for block in new))
        planner._current_batch_jobs_to_flush |= jobs
        # From 0.23 on it also drops the ids of such blocks where a window has left them.
        if hasattr(planner, "_current_batch_allocated_block_ids"):
            planner._current_batch_allocated_block_ids |= new
    return result
