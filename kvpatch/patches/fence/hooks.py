"""The fence between vLLM's connectors and kvcached's page manager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvpatch import state
from kvpatch.environ import KVCACHED_MAX_RESERVED_PAGES
from kvpatch.patch import argument
from kvpatch.patches.fence.fence import Fence, Retired, Transfer
from kvpatch.patches.fence.reserve import PART, Reserve
from kvpatch.patches.fence.windows import KnownBlocks, span_of
from kvpatch.upstream import connectors, kvcached_api


@dataclass
class Fenced:
    """A fence with its page manager; kept on that and on the connector's scheduler."""

    fence: Fence
    manager: Any
    scheduler: Any
    # Called with the ids of pages before they are unmapped.
    on_release: list[Callable[[list[int]], None]] = field(default_factory=list)
    reserve: Reserve | None = None  # the freed pages that stay mapped for a while; None if none do
    # Of these none stays while one of them says that memory is asked for.
    asked: list[Callable[[], bool]] = field(default_factory=list)

    @property
    def holding(self) -> int:
        """The number of pages that were to be unmapped, or will be, and are not yet."""
        return self.fence.holding + (self.reserve.kept if self.reserve is not None else 0)

    def may_keep(self) -> int:
        """Return how many freed pages may stay mapped now; an idle engine would not be stepped."""
        if (
            self.manager.in_shrink
            or not self.scheduler.has_unfinished_requests()
            or any(asks() for asks in self.asked)
        ):
            return 0
        return kvcached_api.free_pages(self.manager) // PART


def compute_barrier(worker: Any) -> bool:
    """Wait for a worker's computation, by RPC, and not for its copies, which the fence covers."""
    device = worker.device  # None on a CPU up to 0.23
    if device is not None and device.type != "cpu":
        import torch

        # torch.cuda, or torch.npu of torch_npu.
        getattr(torch, device.type).current_stream(device).synchronize()
    return True


def wait_for_workers(executor: Any, workers: int) -> None:
    """Wait for the computation of all workers; RuntimeError if one does not answer in time."""
    from vllm import envs

    limit = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
    try:
        answers = executor.collective_rpc(compute_barrier, timeout=limit)
    except TimeoutError as error:
        raise RuntimeError(
            f"a worker did not finish its computation within {limit} s "
            "(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS); its pages cannot be unmapped"
        ) from error
    if len(answers) != workers or not all(answers):
        raise RuntimeError(
            f"{workers} workers had to finish before pages are unmapped, and answered {answers}"
        )


def around_install(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Install the fence between the connector, if there is one, and kvcached."""
    wrapped(*args, **kwargs)
    scheduler = instance.scheduler
    if scheduler.connector is None:
        return
    # SimpleCPUOffloadConnector has no such scheduler, and pins the blocks that it copies.
    planner = connectors.scheduler_of(scheduler.connector)
    manager = kvcached_api.manager_of(instance)
    executor = instance.model_executor

    def blocks_of_page(page: int) -> tuple[int, int]:
        return kvcached_api.blocks_of_page(manager, page)

    workers = instance.vllm_config.parallel_config.world_size

    def barrier() -> None:
        wait_for_workers(executor, workers)

    manager.defer_physical_release = True
    manager.physical_release_barrier = barrier
    kvcached_api.unmap_at_once(manager)
    fence = Fence(blocks_of_page, workers, pinned=planner is None)
    fenced = state.attach(manager, Fenced(fence, manager, scheduler))
    if planner is not None:
        state.attach(planner, fenced)
        if KVCACHED_MAX_RESERVED_PAGES.read() != "0":
            fenced.reserve = Reserve()


def around_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Report the transfers of a step to the fence."""
    meta = wrapped(*args, **kwargs)
    fenced = state.find(instance, Fenced)
    if fenced is not None:
        jobs = [
            (job_id, Transfer(job.req_id, tuple(int(block) for block in spec.block_ids)))
            for batch, side in ((meta.store_jobs, "src_spec"), (meta.load_jobs, "dst_spec"))
            for job_id, job in batch.items()
            for spec in (getattr(job, side),)
        ]
        fenced.fence.plan(jobs, fenced.manager.capture_physical_release_marker())
    return meta


def around_worker_output(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Report completed transfers to the fence."""
    fenced = state.find(instance, Fenced)
    if fenced is not None:
        output = argument(args, kwargs, 0, "connector_output")
        meta = output.kv_connector_worker_meta
        for job_id, workers in meta.completed_jobs.items() if meta is not None else ():
            fenced.fence.report(job_id, workers)
    return wrapped(*args, **kwargs)


def around_pending_work(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep the engine stepping while a freed page is mapped; it becomes idle afterwards."""
    fenced = state.find(instance, Fenced)
    return bool(wrapped(*args, **kwargs)) or (fenced is not None and fenced.holding > 0)


def around_release(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Release only the retired pages that the fence permits; the marker would include all."""
    fenced = state.find(instance, Fenced)
    if fenced is None:
        wrapped(*args, **kwargs)
        return
    fence, scheduler = fenced.fence, fenced.scheduler
    retired: Retired = getattr(instance, "_retired_pages", None) or []
    kept: Retired = []
    if fenced.reserve is not None:
        retired, kept = fenced.reserve.split(retired, fenced.may_keep() if retired else 0)
    can_plan = scheduler.has_unfinished_requests() or scheduler.has_finished_requests()
    released, held = fence.split(retired, can_plan and not fence.pinned)
    for observer in fenced.on_release:
        observer(released)
    if not fence.pinned:
        forget_freed_blocks(connectors.scheduler_of(scheduler.connector), fence, released)
    # Epochs start at 1, so that marker 0 releases exactly the pages that the fence permits.
    instance._retired_pages = [*([(0, released)] if released else ()), *held, *kept]
    wrapped(0)


def forget_freed_blocks(planner: Any, fence: Fence, pages: list[int]) -> None:
    """Exclude blocks of unmapped pages from transfers that are planned later.

    A request with a sliding window keeps the ids of blocks that have left the window, and
    stores them when the CPU tier has room again. vLLM drops such an id when the block
    is reallocated; here the page may be unmapped before that.
    """
    # Up to 0.20 the connector ignores windows: vLLM keeps every block of its requests.
    groups = getattr(planner, "_sliding_window_groups", ())
    if not groups:
        return
    gone = {block for page in pages for block in range(*fence.blocks_of_page(page))}
    spans = set(map(span_of, gone))
    for status in planner._req_status.values():
        for group in groups:
            of = status.group_states[group]
            if not isinstance(of.block_ids, KnownBlocks):
                of.block_ids = KnownBlocks(of.block_ids)
            # In every step, so that the first release after many does not index all of them.
            of.block_ids.catch_up()
            of.block_ids.forget(gone, spans)


def after_reset_of_tier(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Exclude blocks that have left a sliding window from stores that begin again.

    Running requests then store from their first chunk on. What was stored before keeps the ids of
    blocks that are others' since: vLLM drops the ids of what is still to be stored alone.
    """
    wrapped(*args, **kwargs)
    fenced = state.find(instance, Fenced)
    if fenced is not None:
        forget_left_blocks(instance, fenced.scheduler, lambda group: 0)


def forget_left_blocks(planner: Any, scheduler: Any, first: Callable[[Any], int]) -> None:
    """Set the ids of blocks that have left a sliding window to 0, the null block.

    Args:
        first: the position of the first block to look at, of a request's state of a group.
    """
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    for request, status in planner._req_status.items():
        for number in planner._sliding_window_groups:
            group = status.group_states[number]
            manager = managers[planner.config.kv_group_configs[number].group_idx]
            held = manager.req_to_blocks.get(request, ())
            for position in range(first(group), min(len(held), len(group.block_ids))):
                if held[position].is_null:
                    group.block_ids[position] = 0


def after_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Release retired pages after a synchronous step, as kvcached does with the batch queue."""
    result = wrapped(*args, **kwargs)
    release_now(instance)
    return result


def after_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Release the pages of a reset prefix cache, even if the engine is not stepped.

    One in the caller's process is stepped only for requests, and so here until no page is held.
    """
    result = wrapped(*args, **kwargs)
    release_now(instance)
    fence = fence_of(instance)
    while (
        fence is not None
        and fence.holding  # other copies may still be in flight
        and not hasattr(instance, "run_busy_loop")
        and not instance.scheduler.has_unfinished_requests()
    ):
        instance.step_fn()
    return result


def fence_of(engine: Any) -> Fence | None:
    """Return the fence of an ``EngineCore``; None without a connector or with vLLM's own pool."""
    fenced = state.find(kvcached_api.manager_of(engine), Fenced)
    return None if fenced is None else fenced.fence


def release_now(engine: Any) -> None:
    """Release the retired pages that the fence permits."""
    if fence_of(engine) is not None:
        manager = kvcached_api.manager_of(engine)
        manager.release_retired_pages_through(manager.capture_physical_release_marker())


def skip_device_wide_wait(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Do not wait for the device, and so every copy, before an unmap that the fence permitted."""
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    if not has_kv_transfer_group():
        wrapped(*args, **kwargs)
