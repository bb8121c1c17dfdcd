"""The fence: no page is unmapped while a transfer can still touch it.

kvcached unmaps a page when its last block is freed. vLLM's OffloadingConnector
copies blocks after that: it launches a store one step after it planned it, and
plans a request's last stores after the request's blocks were freed. The copy would
read a scratch page, and be served later as this prompt's KV.

So a freed page waits on kvcached's own list of retired pages, where its blocks can
be handed out again at once, until

    planned     the connector has built one step's transfers since the free, after
                which no transfer that names the page's blocks can be planned; and
    named       no transfer that names one of its blocks is queued or in flight.

A transfer counts from the moment the scheduler hands it to the workers until every
worker has reported it; the connector's own record of it is not used, because
resetting its cache forgets transfers that still run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvpatch import audit, connectors
from kvpatch.calls import argument

Retired = list[tuple[int, list[int]]]


@dataclass(frozen=True)
class Transfer:
    """One transfer job: who asked for it and which blocks of the device it names."""

    request: str
    blocks: tuple[int, ...]


@dataclass
class Counters:
    """What the fence did so far.

    Attributes:
        released: pages given back through the fence.
        held_for_plan: pages that had to wait for the next step's transfers to be built.
        held_for_transfer: pages that had to wait for a transfer to end.
        longest_hold: most steps that a page waited.
    """

    released: int = 0
    held_for_plan: int = 0
    held_for_transfer: int = 0
    longest_hold: int = 0


@dataclass
class _Hold:
    since: int
    rules: set[str] = field(default_factory=set)


class Fence:
    """Decides which retired pages may be unmapped now.

    Args:
        blocks_of_page: the block ids ``[start, end)`` of a page.
        workers: reports that end a transfer, one from each worker.
        pinned: the connector keeps a reference to every block of a transfer until it has
            ended. A freed page is then never named, and only waits for the computation.
    """

    def __init__(
        self,
        blocks_of_page: Callable[[int], tuple[int, int]],
        workers: int,
        pinned: bool = False,
    ) -> None:
        self.counters = Counters()
        self.transfers: dict[int, Transfer] = {}
        self.blocks_of_page = blocks_of_page
        self.pinned = pinned
        self.workers = workers
        self._reports: Counter[int] = Counter()
        self._named: Counter[int] = Counter()
        self._planned_epoch = 0
        self._builds = 0
        self._holds: dict[int, _Hold] = {}

    @property
    def holding(self) -> int:
        """Pages that are held back now."""
        return len(self._holds)

    def plan(self, jobs: Iterable[tuple[int, Transfer]], epoch: int) -> None:
        """Take note of one built step.

        Args:
            jobs: every transfer the step hands to the workers, by job id.
            epoch: the newest retirement; all up to it came before the step was built.
        """
        for job_id, transfer in jobs:
            if job_id not in self.transfers:
                self.transfers[job_id] = transfer
                self._named.update(transfer.blocks)
        self._planned_epoch = epoch
        self._builds += 1

    def report(self, job_id: int, workers: int) -> None:
        """Take note that ``workers`` more workers have ended a transfer."""
        self._reports[job_id] += workers
        if self._reports[job_id] < self.workers:
            return
        del self._reports[job_id]
        transfer = self.transfers.pop(job_id, None)
        if transfer is not None:
            for block in transfer.blocks:
                if self._named[block] > 1:
                    self._named[block] -= 1
                else:
                    del self._named[block]

    def split(self, retired: Retired, can_plan: bool) -> tuple[list[int], Retired]:
        """Part retired pages into those that may be unmapped and those held back.

        Args:
            retired: (epoch, page ids) in kvcached's own form.
            can_plan: whether anything can still plan a transfer at all; an engine
                without requests cannot, and need not be stepped to find out.
        """
        released: list[int] = []
        held: Retired = []
        holds: dict[int, _Hold] = {}
        for epoch, pages in retired:
            kept = []
            for page in pages:
                rule = self._rule(epoch, page, can_plan)
                hold = self._holds.get(page) or _Hold(self._builds)
                if rule is None:
                    released.append(page)
                    self._count_release(hold)
                else:
                    hold.rules.add(rule)
                    holds[page] = hold
                    kept.append(page)
            if kept:
                held.append((epoch, kept))
        self._holds = holds
        return released, held

    def _rule(self, epoch: int, page: int, can_plan: bool) -> str | None:
        if can_plan and epoch > self._planned_epoch:
            return "plan"
        if self._named:
            start, end = self.blocks_of_page(page)
            if not self._named.keys().isdisjoint(range(start, end)):
                return "transfer"
        return None

    def _count_release(self, hold: _Hold) -> None:
        self.counters.released += 1
        self.counters.held_for_plan += "plan" in hold.rules
        self.counters.held_for_transfer += "transfer" in hold.rules
        self.counters.longest_hold = max(self.counters.longest_hold, self._builds - hold.since)


def compute_barrier(worker: Any) -> bool:
    """Wait for the compute a worker has launched; runs in the worker by RPC.

    kvcached's own barrier waits for the whole device and so for every copy, however
    long; the fence has already seen to the copies.
    """
    device = worker.device  # up to 0.23 a CPU's worker has none
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.current_stream(device).synchronize()
    return True


def around_install(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Put the fence between the connector and kvcached, when there is a connector.

    Wraps ``EngineCore._kvcached_install_ordered_unmap``, which kvcached calls at the
    end of the engine's set-up.
    """
    wrapped(*args, **kwargs)
    scheduler = instance.scheduler
    if scheduler.connector is None:
        return
    # SimpleCPUOffloadConnector has no such scheduler, and pins what it copies.
    planner = connectors.planner(scheduler.connector)
    manager = manager_of(instance)
    executor = instance.model_executor

    from kvcached.kv_cache_manager import InternalPage

    def blocks_of_page(page: int) -> tuple[int, int]:
        start, end = InternalPage.get_block_range(page, manager.page_size, manager.block_mem_size)
        return int(start), int(end)

    def barrier() -> None:
        executor.collective_rpc(compute_barrier)

    manager.defer_physical_release = True
    manager.physical_release_barrier = barrier
    fence = Fence(
        blocks_of_page, instance.vllm_config.parallel_config.world_size, pinned=planner is None
    )
    manager.kvpatch_fence = fence
    manager.kvpatch_scheduler = scheduler
    if planner is not None:
        planner.kvpatch_fence = fence
        planner.kvpatch_manager = manager
        if audit.wanted():
            start, end = blocks_of_page(0)
            executor.collective_rpc(audit.tell_page_size, args=(end - start,))


def around_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Tell the fence which transfers a step hands out.

    Wraps ``OffloadingConnectorScheduler.build_connector_meta``.
    """
    meta = wrapped(*args, **kwargs)
    fence: Fence | None = getattr(instance, "kvpatch_fence", None)
    if fence is not None:
        jobs = [
            (job_id, Transfer(job.req_id, tuple(int(block) for block in spec.block_ids)))
            for batch, side in ((meta.store_jobs, "src_spec"), (meta.load_jobs, "dst_spec"))
            for job_id, job in batch.items()
            for spec in (getattr(job, side),)
        ]
        fence.plan(jobs, instance.kvpatch_manager.capture_physical_release_marker())
    return meta


def around_worker_output(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Tell the fence which transfers have ended.

    Wraps ``OffloadingConnectorScheduler.update_connector_output``.
    """
    fence: Fence | None = getattr(instance, "kvpatch_fence", None)
    if fence is not None:
        output = argument(args, kwargs, 0, "connector_output")
        meta = output.kv_connector_worker_meta
        for job_id, workers in meta.completed_jobs.items() if meta is not None else ():
            fence.report(job_id, workers)
    return wrapped(*args, **kwargs)


def around_pending_work(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep the engine stepping while a page is held back, and let it sleep after.

    Wraps ``OffloadingConnectorScheduler.has_pending_push_work``, vLLM's own way for a
    connector to ask for steps.
    """
    fence: Fence | None = getattr(instance, "kvpatch_fence", None)
    return bool(wrapped(*args, **kwargs)) or (fence is not None and fence.holding > 0)


def around_release(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Release only the retired pages that the fence lets go.

    Wraps kvcached's ``KVCacheManager.release_retired_pages_through(marker)``. The
    marker is the newest retirement, so that it selects nothing by itself.
    """
    fence: Fence | None = getattr(instance, "kvpatch_fence", None)
    if fence is None:
        wrapped(*args, **kwargs)
        return
    retired: Retired = getattr(instance, "_retired_pages", None) or []
    scheduler = instance.kvpatch_scheduler
    can_plan = scheduler.has_unfinished_requests() or scheduler.has_finished_requests()
    released, held = fence.split(retired, can_plan and not fence.pinned)
    if not fence.pinned:
        planner = connectors.planner(scheduler.connector)
        if audit.wanted():
            audit.check_release(planner, released)
        forget_freed_blocks(planner, released)
    # Epochs begin at 1, so that marker 0 releases exactly what the fence let go.
    instance._retired_pages = [(0, released), *held] if released else held
    wrapped(0)


def forget_freed_blocks(planner: Any, pages: list[int]) -> None:
    """Keep blocks of unmapped pages out of transfers that are planned much later.

    A sliding-window request keeps the ids of blocks that fell out of its window, and
    stores them when the CPU tier has room again. vLLM drops such an id when the block
    is handed out anew; here the page is gone first.
    """
    # Up to 0.20 the connector knows no windows: vLLM keeps every block of its requests.
    if not pages or not getattr(planner, "_sliding_window_groups", ()):
        return
    gone: set[int] = set()
    for page in pages:
        gone.update(range(*planner.kvpatch_fence.blocks_of_page(page)))
    for status in planner._req_status.values():
        for group in planner._sliding_window_groups:
            blocks = status.group_states[group].block_ids
            for position, block in enumerate(blocks):
                if block in gone:
                    blocks[position] = 0


def after_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Release what a synchronous step has let go.

    Wraps ``EngineCore.step``; kvcached does the same after a step of its batch queue.
    """
    result = wrapped(*args, **kwargs)
    release_now(instance)
    return result


def after_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Give the pages of a reset prefix cache back, even when nobody steps the engine.

    Wraps ``EngineCore.reset_prefix_cache``. An engine in its own process goes on
    stepping by itself; one inside the caller's process is stepped only for requests,
    so the steps that the fence waits for are made here.
    """
    result = wrapped(*args, **kwargs)
    release_now(instance)
    fence = fence_of(instance)
    while (
        fence is not None
        and fence.holding  # other copies may go on; nobody waits for them here
        and not hasattr(instance, "run_busy_loop")
        and not instance.scheduler.has_unfinished_requests()
    ):
        instance.step_fn()
    return result


def manager_of(engine: Any) -> Any:
    """Return kvcached's manager of an ``EngineCore``'s pages."""
    return engine.scheduler.kv_cache_manager.block_pool.kv_cache_manager


def fence_of(engine: Any) -> Fence | None:
    """Return the fence of an ``EngineCore``, or None: no connector, or vLLM's own pool."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    return getattr(getattr(pool, "kv_cache_manager", None), "kvpatch_fence", None)


def release_now(engine: Any) -> None:
    """Let the fence release what it can."""
    if fence_of(engine) is not None:
        manager = manager_of(engine)
        manager.release_retired_pages_through(manager.capture_physical_release_marker())


def skip_device_wide_wait(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Do not wait for copies before an unmap that the fence has let through.

    Wraps ``_sync_before_unmap`` in a worker's listener thread, which waits for the
    whole device and so for every copy in flight.
    """
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    if not has_kv_transfer_group():
        wrapped(*args, **kwargs)
