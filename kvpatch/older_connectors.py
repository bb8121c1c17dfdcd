"""OffloadingConnector before vLLM 0.26, in the terms of later releases.

What the connector does is the same; what it calls things is not. Each adapter presents
the older object under the newer names and leaves the work to the code for those.

    up to 0.25  the worker finds the KV cache's plan in its spec, not in itself
    up to 0.24  it registers handlers with a worker, one a direction, instead of a worker,
                and a transfer is a pair of specs instead of two fields
    up to 0.23  a connector cannot ask for steps; the scheduler is asked instead
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvpatch import fence, geometry


def register_with_spec(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions with the worker of 0.25."""
    _register(instance, instance._init_worker, args, kwargs)


def register_with_handlers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions with the worker of 0.21 to 0.24."""
    _register(instance, instance._register_handlers, args, kwargs)


def _register(instance: Any, init: Callable[[Any], None], args: Any, kwargs: Any) -> None:
    spec = instance.spec
    block = spec.cpu_page_size_per_worker // spec.block_size_factor
    later = SimpleNamespace(
        kv_cache_config=spec.kv_cache_config,
        spec=SimpleNamespace(config=SimpleNamespace(worker_kv_bytes_per_block=block)),
        _init_worker=init,
    )
    geometry.register_regions(None, later, args, kwargs)


def around_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Tell the fence which transfers a step of 0.21 to 0.24 hands out."""
    meta = wrapped(*args, **kwargs)

    def jobs(of: dict[int, Any]) -> dict[int, Any]:
        return {
            job_id: SimpleNamespace(
                req_id=job.req_id, src_spec=job.transfer_spec[0], dst_spec=job.transfer_spec[1]
            )
            for job_id, job in of.items()
        }

    later = SimpleNamespace(store_jobs=jobs(meta.store_jobs), load_jobs=jobs(meta.load_jobs))
    fence.around_build(lambda: later, instance, (), {})
    return meta


def around_has_requests(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep an engine of 0.21 to 0.23 stepping while a page is held back.

    Wraps ``Scheduler.has_requests``.
    """
    planner = getattr(instance.connector, "connector_scheduler", None)
    return fence.around_pending_work(wrapped, planner, args, kwargs)
