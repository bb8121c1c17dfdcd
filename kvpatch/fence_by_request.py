"""The fence where a connector knows its transfers by request: vLLM 0.16 to 0.20.

Its stores and loads have no job ids, and it hears of them when all of a request's have
ended. So each gets a number here when it is handed out, and ends when

    the request's loads, or all its stores after it finished, are reported; or
    the workers have run the step in which the request was preempted: before it they
    wait for what the request stores.

A request that finishes while it is stored keeps its blocks until it is reported, and the
engine has to go on stepping to hear of it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvpatch import connectors
from kvpatch.calls import argument
from kvpatch.fence import Fence, Transfer


@dataclass
class Numbers:
    """The numbers of the transfers that have not ended, by request."""

    next: Any = field(default_factory=count)
    stores: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    loads: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


def numbers_of(planner: Any) -> Numbers:
    """Return the numbers of an ``OffloadingConnectorScheduler``."""
    if not hasattr(planner, "kvpatch_numbers"):
        planner.kvpatch_numbers = Numbers()
    numbers: Numbers = planner.kvpatch_numbers
    return numbers


def around_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Tell the fence which transfers a step hands out, and which it waits for.

    Wraps ``OffloadingConnectorScheduler.build_connector_meta``.
    """
    output = argument(args, kwargs, 0, "scheduler_output")
    meta = wrapped(*args, **kwargs)
    fence: Fence | None = getattr(instance, "kvpatch_fence", None)
    if fence is None:
        return meta
    numbers = numbers_of(instance)
    # With the step itself, which comes back when the workers have run it.
    meta.kvpatch_waited_for = [
        number
        for request in output.preempted_req_ids or ()
        for number in numbers.stores.pop(request, ())
    ]
    planned = []
    for batch, side, by_request in (
        (meta.reqs_to_store, 0, numbers.stores),
        (meta.reqs_to_load, 1, numbers.loads),
    ):
        for request, pair in batch.items():
            number = next(numbers.next)
            by_request[request].append(number)
            blocks = tuple(int(block) for block in pair[side].block_ids)
            planned.append((number, Transfer(request, blocks)))
    fence.plan(planned, instance.kvpatch_manager.capture_physical_release_marker())
    return meta


def around_worker_output(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Tell the fence which requests' transfers have ended, on every worker.

    Wraps ``OffloadingConnectorScheduler.update_connector_output``.
    """
    fence: Fence | None = getattr(instance, "kvpatch_fence", None)
    if fence is not None:
        output = argument(args, kwargs, 0, "connector_output")
        numbers = numbers_of(instance)
        for ended, by_request in (
            (output.finished_sending, numbers.stores),
            (output.finished_recving, numbers.loads),
        ):
            for request in ended or ():
                _end(fence, by_request.pop(request, ()))
    return wrapped(*args, **kwargs)


def around_step_output(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Tell the fence that the workers have waited for what preempted requests store.

    Wraps ``Scheduler.update_from_output``.
    """
    planner = connectors.planner(instance.connector)
    fence: Fence | None = getattr(planner, "kvpatch_fence", None)
    if fence is not None:
        meta = argument(args, kwargs, 0, "scheduler_output").kv_connector_metadata
        _end(fence, meta.kvpatch_waited_for)
    return wrapped(*args, **kwargs)


def around_has_requests(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep the engine stepping while a transfer runs or a page is held back.

    Wraps ``Scheduler.has_requests``: a connector cannot ask for steps.
    """
    planner = connectors.planner(instance.connector)
    fence: Fence | None = getattr(planner, "kvpatch_fence", None)
    waits = fence is not None and bool(fence.transfers or fence.holding)
    return bool(wrapped(*args, **kwargs)) or waits


def _end(fence: Fence, numbers: Any) -> None:
    for number in numbers:
        fence.report(number, fence.workers)
