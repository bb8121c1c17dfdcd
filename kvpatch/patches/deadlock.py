"""Loaded requests that wait for memory release theirs when nothing else can run.

A request whose KV was loaded from a tier holds its blocks while it waits for the ones it
still has to compute, and vLLM preempts running requests only. It admits a load when
everything will fit; on elastic memory what fits can become less meanwhile, when a limit
is lowered or a neighbour takes pages. Then several such requests wait for each other,
or two engines do, and nothing ever runs again.

What is released is still in the tier: the request loads it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpatch import state
from kvpatch.patch import Feature, Patch
from kvpatch.supported import FLOOR

# Steps without anything to run. A few are normal: batches in flight end in them. One
# request alone frees something for the one before it in the queue, for itself nothing but
# much for another engine; then it waits longer, so that two engines do not take turns at
# giving up.
SEVERAL_WAIT = 4
ONE_WAITS = 1000


@dataclass
class Idle:
    """Steps in a row in which nothing could run, kept on the ``Scheduler``."""

    steps: int = 0


QUEUED = ("WAITING", "PREEMPTED")
# In the order in which they are tried; the first came with 0.32 and the second with 0.18.
QUEUES = ("kv_holding_waiting", "skipped_waiting", "waiting")


def around_schedule(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let the youngest loaded request go when the scheduler stands still.

    Wraps ``Scheduler.schedule``.
    """
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
    holders = [request for request in instance.requests.values() if _holds(request)]
    if not holders or any(_loading(instance, request) for request in holders):
        idle.steps = 0
        return output
    idle.steps += 1
    first = _first(instance)
    others = [request for request in holders if request is not first]
    several = len(holders) > 1 or (others and first is not None)
    if idle.steps >= (SEVERAL_WAIT if several else ONE_WAITS):
        idle.steps = 0
        # Not the one that is tried first: it would take all of it again before the others.
        release(instance, max(others or holders, key=lambda request: request.arrival_time))
    return output


def _first(scheduler: Any) -> Any:
    """Return the request that the scheduler tries first, and before all others; or None."""
    queues = (getattr(scheduler, name, None) for name in QUEUES)
    heads = [queue.peek_request() for queue in queues if queue]
    if not heads:
        return None
    return min(heads) if scheduler.policy.name == "PRIORITY" else heads[0]


def _paused(scheduler: Any) -> bool:
    """Whether an operator keeps the scheduler from running requests, which 0.16 cannot."""
    state = getattr(scheduler, "pause_state", None)
    return state is not None and state.name != "UNPAUSED"


def _holds(request: Any) -> bool:
    """Whether a request that does not run has blocks: of those, only a loaded one has.

    The queues that it waits in are other ones from release to release, and up to 0.17 its
    tokens count as computed only when the scheduler has looked at it after the load.
    """
    queued = request.num_computed_tokens > 0 and request.status.name in QUEUED
    return _remote(request) or queued


def _remote(request: Any) -> bool:
    return bool(request.status.name == "WAITING_FOR_REMOTE_KVS")


def _loading(scheduler: Any, request: Any) -> bool:
    return _remote(request) and request.request_id not in scheduler.finished_recving_kv_req_ids


def release(scheduler: Any, request: Any) -> None:
    """Free what a loaded request holds; it is scheduled again as if it had just come."""
    if _remote(request):  # loaded, but nobody has looked since
        scheduler._update_waiting_for_remote_kv(request)
        states = type(request.status)
        request.status = states.PREEMPTED if request.num_preemptions else states.WAITING
    if hasattr(scheduler, "_free_request_blocks"):
        scheduler._free_request_blocks(request)
    else:  # up to 0.23 nothing is freed later
        scheduler.kv_cache_manager.free(request)
    if hasattr(scheduler, "_inflight_prefills"):  # from 0.23 on
        scheduler._inflight_prefills.discard(request)
    request.num_computed_tokens = 0


FEATURE = Feature(
    name="standstill",
    summary="loaded requests that wait for memory release theirs when nothing else can run",
    since=FLOOR,
    seams=(
        Patch(
            id="standstill.schedule",
            target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
            why="vLLM never preempts a loaded request that waits, and memory can become less "
            "after its load was admitted",
            upstream="none: on memory of fixed size what was admitted goes on fitting",
            until="vLLM preempts requests that wait with loaded blocks",
            wrapper="kvpatch.patches.deadlock:around_schedule",
            parameters=("self",),
            since="0.16",
        ),
    ),
)
