"""OffloadingConnector before vLLM 0.26, in the terms of later releases.

What the connector does is the same; what it calls things is not. Each adapter presents
the older object under the newer names and leaves the work to the code for those.

    0.26        an aborted request is stored as if all of it were computed
    up to 0.25  the worker finds the KV cache's plan in its spec, not in itself
    up to 0.24  it registers handlers with a worker, one a direction, instead of a worker,
                and a transfer is a pair of specs instead of two fields
    up to 0.23  a connector cannot ask for steps; the scheduler is asked instead
    up to 0.22  a block that left a sliding window may be stored when it is another's
    up to 0.20  transfers belong to requests and have no ids: see ``fence_by_request``
    up to 0.18  the worker is registered with tensors and the backends that say their shapes
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvpatch import connectors, fence, geometry
from kvpatch.calls import argument


def register_with_spec(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions with the worker of 0.25."""
    _register(instance, instance._init_worker, args, kwargs)


def register_with_handlers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions with the worker of 0.19 to 0.24."""
    _register(instance, instance._register_handlers, args, kwargs)


class OneRegion:
    """An attention backend whose KV cache is one region: blocks, tokens, bytes of a token."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, int, int]:
        """Return where vLLM finds blocks and their tokens."""
        return num_blocks, block_size, num_kv_heads * head_size


def register_with_backends(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions with the worker of 0.16 to 0.18, as a layer each."""
    kv_caches = argument(args, kwargs, 0, "kv_caches")
    size = instance.spec.gpu_block_size  # one for each group in 0.18, and there is one
    tokens = size if isinstance(size, int) else size[0]
    regions = {
        f"region {index}": tensor.view(len(tensor), tokens, -1)
        for index, tensor in enumerate(
            geometry.checked_regions(_later(instance), kv_caches).tensors
        )
    }
    instance._register_handlers(regions, dict.fromkeys(regions, OneRegion))


def block_bytes(spec: Any) -> int:
    """Return the bytes of a block that the CPU tier was sized by."""
    if hasattr(spec, "cpu_page_size_per_worker"):  # of a chunk of blocks
        return int(spec.cpu_page_size_per_worker // spec.block_size_factor)
    plan = spec.kv_cache_config
    return int(sum(tensor.size for tensor in plan.kv_cache_tensors) // plan.num_blocks)


def _register(instance: Any, init: Callable[[Any], None], args: Any, kwargs: Any) -> None:
    later = _later(instance)
    later._init_worker = init
    geometry.register_regions(None, later, args, kwargs)
    instance.kvpatch_rows = later.kvpatch_rows


def _later(worker: Any) -> SimpleNamespace:
    """Return what later releases have in the ``OffloadingConnectorWorker`` itself."""
    spec = worker.spec
    config = SimpleNamespace(worker_kv_bytes_per_block=block_bytes(spec))
    return SimpleNamespace(
        kv_cache_config=spec.kv_cache_config, spec=SimpleNamespace(config=config)
    )


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


def before_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Keep blocks that have left a sliding window out of what 0.21 and 0.22 store.

    Wraps ``OffloadingConnectorScheduler.build_connector_meta``. A request keeps the ids of
    such blocks until the CPU tier has room for them. From 0.23 on vLLM drops an id when the
    block is handed out again; here it stays, and the next owner's bytes are stored for it.
    """
    manager = getattr(instance, "kvpatch_manager", None)
    if manager is not None and instance._sliding_window_groups:
        coordinator = manager.kvpatch_scheduler.kv_cache_manager.coordinator
        for request, status in instance._req_status.items():
            for group in instance._sliding_window_groups:
                state = status.group_states[group]
                held = coordinator.single_type_managers[group].req_to_blocks.get(request, ())
                first = state.next_stored_block_idx * instance.config.block_size_factor
                for position in range(first, min(len(held), len(state.block_ids))):
                    if held[position].is_null:
                        state.block_ids[position] = 0
    return wrapped(*args, **kwargs)


def around_has_requests(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep an engine of 0.21 to 0.23 stepping while a page is held back.

    Wraps ``Scheduler.has_requests``.
    """
    planner = connectors.planner(instance.connector)
    return fence.around_pending_work(wrapped, planner, args, kwargs)


def around_storable(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> int:
    """Store no more of a request than it has blocks for, nor of an aborted one than it computed.

    Wraps ``RequestOffloadState.storable_chunks`` of 0.26, which stores what a finished
    request left: the whole prompt, of one that was aborted before it ran too.
    """
    group = argument(args, kwargs, 0, "group_config")
    held = len(instance.group_states[group.group_idx].block_ids)
    chunks: int = min(wrapped(*args, **kwargs), held // instance.config.blocks_per_chunk)
    if instance.req.status.name == "FINISHED_ABORTED":
        chunks = min(chunks, instance.req.num_computed_tokens // group.tokens_per_chunk)
    return chunks
