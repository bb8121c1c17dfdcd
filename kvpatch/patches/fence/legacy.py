"""The fence before vLLM 0.25, in the terms of later releases.

Up to 0.20 the connector is notified when all stores or loads of a request have completed. So each
transfer is numbered here when it is passed to the workers, and completes when the request's loads,
or all its stores after it finished, are reported; or when the workers have run the step in which
the request was preempted, before which they wait for its stores. A request that finishes while it
is stored keeps its blocks until its stores are reported, for which the engine has to keep stepping.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.patches.fence import hooks
from kvpatch.patches.fence.fence import Fence, Transfer
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.upstream import connectors


@dataclass
class Numbers:
    """The transfers in flight, by request; kept on the ``OffloadingConnectorScheduler``."""

    next: Any = field(default_factory=count)
    stores: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    loads: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class WaitedFor:
    """The transfers that workers wait for before a step; kept on the step's metadata."""

    numbers: list[int]


def around_build_of_pairs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Report the transfers of a step of 0.21 to 0.24 to the fence."""
    meta = wrapped(*args, **kwargs)

    def jobs(of: dict[int, Any]) -> dict[int, Any]:
        return {
            job_id: SimpleNamespace(
                req_id=job.req_id, src_spec=job.transfer_spec[0], dst_spec=job.transfer_spec[1]
            )
            for job_id, job in of.items()
        }

    later = SimpleNamespace(store_jobs=jobs(meta.store_jobs), load_jobs=jobs(meta.load_jobs))
    hooks.around_build(lambda: later, instance, (), {})
    return meta


def before_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Exclude blocks that have left a sliding window from the stores of 0.21 and 0.22.

    There the id of a reallocated block stays, and the next owner's bytes are stored under it.
    """
    fenced = state.find(instance, Fenced)
    if fenced is not None and instance._sliding_window_groups:
        factor = instance.config.block_size_factor
        hooks.forget_left_blocks(
            instance, fenced.scheduler, lambda group: int(group.next_stored_block_idx) * factor
        )
    return wrapped(*args, **kwargs)


def around_has_requests(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep an engine of 0.21 to 0.23 stepping while a page is held."""
    planner = connectors.scheduler_of(instance.connector)
    return hooks.around_pending_work(wrapped, planner, args, kwargs)


def around_build_by_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Report the transfers of a step to the fence, and record those that it waits for."""
    output = argument(args, kwargs, 0, "scheduler_output")
    meta = wrapped(*args, **kwargs)
    fenced = state.find(instance, Fenced)
    if fenced is None:
        return meta
    numbers = state.of(instance, Numbers)
    waited_for = [
        number
        for request in output.preempted_req_ids or ()
        for number in numbers.stores.pop(request, ())
    ]
    # Kept with the step, which is returned when the workers have run it.
    state.attach(meta, WaitedFor(waited_for))
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
    fenced.fence.plan(planned, fenced.manager.capture_physical_release_marker())
    return meta


def around_worker_output_by_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Report requests whose transfers have completed on every worker to the fence."""
    fenced = state.find(instance, Fenced)
    if fenced is not None:
        output = argument(args, kwargs, 0, "connector_output")
        numbers = state.of(instance, Numbers)
        for ended, by_request in (
            (output.finished_sending, numbers.stores),
            (output.finished_recving, numbers.loads),
        ):
            for request in ended or ():
                _end(fenced.fence, by_request.pop(request, ()))
    return wrapped(*args, **kwargs)


def around_step_output(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Report to the fence that the workers have waited for the stores of preempted requests."""
    fenced = state.find(connectors.scheduler_of(instance.connector), Fenced)
    if fenced is not None:
        meta = argument(args, kwargs, 0, "scheduler_output").kv_connector_metadata
        waited_for = state.find(meta, WaitedFor)
        _end(fenced.fence, waited_for.numbers if waited_for is not None else ())
    return wrapped(*args, **kwargs)


def around_has_requests_by_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep the engine stepping while a transfer is in flight or a page is held."""
    fenced = state.find(connectors.scheduler_of(instance.connector), Fenced)
    waits = fenced is not None and bool(fenced.fence.transfers or fenced.holding)
    return bool(wrapped(*args, **kwargs)) or waits


def _end(fence: Fence, numbers: Any) -> None:
    for number in numbers:
        fence.report(number, fence.workers)
