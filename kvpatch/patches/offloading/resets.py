"""Resets of the caches that vLLM's OffloadingConnector does not expect.

vLLM's reset of running requests preempts them, and one of the CPU tier names its copies in flight
to the next step, which waits for them. Both are asserted to come at the right time: that a
preempted request is loaded in a later step, and that a step comes between two resets.
"""

from __future__ import annotations

from typing import Any

from kvpatch.patch import argument


def around_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Keep the loads of this step out of what a preempted request is flushed of.

    A request that a reset has preempted can be loaded in the next step, which still names it. No
    worker has that load yet, so nothing is to be waited for.
    """
    output = argument(args, kwargs, 0, "scheduler_output")
    statuses = [instance._req_status.get(name) for name in output.preempted_req_ids or ()]
    of_requests = [status.transfer_jobs for status in statuses if status is not None]
    begun = [jobs.intersection(instance._current_batch_load_jobs) for jobs in of_requests]
    for jobs, loads in zip(of_requests, begun, strict=True):
        jobs.difference_update(loads)
    try:
        return wrapped(*args, **kwargs)
    finally:
        for jobs, loads in zip(of_requests, begun, strict=True):
            jobs.update(loads)


def around_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Reset the CPU tier again before a step, and keep what the next step waits for.

    Other copies than those of an earlier reset mean a step is being scheduled, as vLLM asserts.
    """
    waits_for = instance._current_batch_jobs_to_flush
    discarded = {job for job in waits_for if job < instance._stale_job_threshold}
    waits_for -= discarded
    try:
        return wrapped(*args, **kwargs)
    finally:
        instance._current_batch_jobs_to_flush |= discarded
