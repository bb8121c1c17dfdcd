"""Loaded requests that wait for memory free their blocks when nothing else can run.

Such a request holds its blocks while it waits for those that it still has to compute, and vLLM
preempts only running requests. It admits a load when the whole request fits, but on elastic memory
the available memory can shrink afterwards. Then several such requests, or two engines, wait for
each other and never run. Freed blocks are still in the tier, and the request loads them again.
"""

from __future__ import annotations

from typing import Any

from kvpatch import state
from kvpatch.rows import Row, feature
from kvpatch.supported import FLOOR

# Steps without anything to run. A few are normal: batches in flight end in them. A single
# loaded request frees memory for a request ahead of it in the queue; at the head it frees
# memory only for another engine, and waits longer, so that two engines do not take turns.
SEVERAL_WAIT = 4
ONE_WAITS = 1000


class Idle:
    """Consecutive steps in which nothing could run; kept on the ``Scheduler``."""

    steps: int = 0


QUEUED = ("WAITING", "PREEMPTED")
# In the order in which they are scheduled; the first exists from 0.32, the second from 0.18.
QUEUES = ("kv_holding_waiting", "skipped_waiting", "waiting")


def around_schedule(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Free the blocks of the youngest loaded request when the scheduler makes no progress."""
    output = wrapped(*args, **kwargs)
    idle = state.of(instance, Idle)
    if (
        output.total_num_scheduled_tokens
        or instance.running
        or instance.connector is None
        or _paused(instance)
    ):
        idle.steps = 0
        return output
    holders = [request for request in instance.requests.values() if holds(request)]
    if not holders or any(_loading(instance, request) for request in holders):
        idle.steps = 0
        return output
    idle.steps += 1
    first = _first(instance)
    others = [request for request in holders if request is not first]
    several = len(holders) > 1 or (others and first is not None)
    if idle.steps >= (SEVERAL_WAIT if several else ONE_WAITS):
        idle.steps = 0
        # Not the request that is scheduled first: it would allocate the blocks again.
        release(instance, max(others or holders, key=lambda request: request.arrival_time))
    return output


def _first(scheduler: Any) -> Any:
    """Return the request that the scheduler tries first, or None."""
    queues = (getattr(scheduler, name, None) for name in QUEUES)
    heads = [queue.peek_request() for queue in queues if queue]
    if not heads:
        return None
    return min(heads) if scheduler.policy.name == "PRIORITY" else heads[0]


def _paused(scheduler: Any) -> bool:
    """Whether an operator has paused the scheduler, which is not possible in 0.16."""
    state = getattr(scheduler, "pause_state", None)
    return state is not None and state.name != "UNPAUSED"


def holds(request: Any) -> bool:
    """Whether a request that is not running holds blocks: only a loaded one does.

    Up to 0.17 its tokens count as computed only once the scheduler has visited it after the load.
    """
    queued = request.num_computed_tokens > 0 and request.status.name in QUEUED
    return _remote(request) or queued


def _remote(request: Any) -> bool:
    return bool(request.status.name == "WAITING_FOR_REMOTE_KVS")


def _loading(scheduler: Any, request: Any) -> bool:
    return _remote(request) and request.request_id not in scheduler.finished_recving_kv_req_ids


def release(scheduler: Any, request: Any) -> None:
    """Free the blocks of a loaded request; it is scheduled again like a new one."""
    if _remote(request):  # loaded, but not visited by the scheduler since
        scheduler._update_waiting_for_remote_kv(request)
        states = type(request.status)
        request.status = states.PREEMPTED if request.num_preemptions else states.WAITING
    if hasattr(scheduler, "_free_request_blocks"):
        scheduler._free_request_blocks(request)
    else:  # up to 0.23 no free is deferred
        scheduler.kv_cache_manager.free(request)
    if hasattr(scheduler, "_inflight_prefills"):  # from 0.23 on
        scheduler._inflight_prefills.discard(request)
    request.num_computed_tokens = 0


FEATURE = feature(
    __name__,
    summary="loaded requests that wait for memory free their blocks when nothing else can run",
    since=FLOOR,
    seams=(
        Row(
            "deadlock.schedule",
            "vllm.v1.core.sched.scheduler:Scheduler.schedule",
            ":around_schedule",
            "vLLM never preempts a waiting request with loaded blocks, and the available "
            "memory can shrink after its load was admitted",
            "none: with memory of fixed size an admitted request always fits",
            "vLLM preempts waiting requests with loaded blocks",
        ),
    ),
)
