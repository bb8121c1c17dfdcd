"""Completion of copies: observed by an idle engine, and awaited at shutdown."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvpatch.patches.simple_offload.eviction import order_of
from kvpatch.refusal import Halted


def around_pending_work(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep the engine stepping while blocks wait for a copy; it becomes idle afterwards.

    The connector observes in a step that a copy has completed, until which pages stay mapped.
    """
    if wrapped(*args, **kwargs):
        return True
    scheduler = instance.scheduler_manager
    return scheduler is not None and waits_for_copies(scheduler)


def waits_for_copies(scheduler: Any) -> bool:
    """Whether a ``SimpleCPUOffloadScheduler`` has to be stepped, with or without requests."""
    order = order_of(scheduler)
    return bool(
        scheduler.has_pending_stores()
        or scheduler._reqs_to_load
        # Up to 0.23 the connector cannot be reset, and no load is abandoned.
        or getattr(scheduler, "_abandoned_reqs_to_load", None)
        or (order is not None and order.above_cap)
    )


def around_shutdown(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wait for copies in flight before kvcached unmaps the memory they touch."""
    worker = instance.worker_handler
    if worker is not None and worker._backend is not None:
        worker._backend.shutdown()  # launches the queued copies, so that each has an event
        with suppress(Halted):  # a copy that failed; the engine ends in any case
            worker._flush_and_sync_all()
    return wrapped(*args, **kwargs)
