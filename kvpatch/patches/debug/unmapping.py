"""Debug mode: before pages are unmapped, vLLM's own record of transfers must not name them.

The record is the connector's, so that a fault of the fence shows. SimpleCPUOffloadConnector needs
no check: it keeps a reference to every block of its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvpatch import state
from kvpatch.patches.debug.audit import Violation, tell_page_size
from kvpatch.patches.fence.fence import Fence
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.upstream import connectors, kvcached_api

# A block that a transfer names, the transfer's job and its request.
Named = tuple[int, int | str, str]
# From vLLM's scheduler and the connector's to what the latter has on record.
Record = Callable[[Any, Any], Iterator[Named]]


def stores(scheduler: Any, planner: Any) -> Iterator[Named]:
    """Iterate over the blocks of stores that have not ended."""
    for job_id, job in planner._jobs.items():
        for block in (*(job.deferred_fence_block_ids or ()), *(job.fenced_block_ids or ())):
            yield block, job_id, job.req_id


def check_release(named: Iterable[Named], fence: Fence, pages: list[int]) -> None:
    """Raise Violation if a transfer that has not ended names a block of pages to be unmapped."""
    page_of = {block: page for page in pages for block in range(*fence.blocks_of_page(page))}
    for block, job, request in named if page_of else ():
        if block in page_of:
            raise Violation(
                "a page is unmapped under a transfer", block, page_of[block], job, request
            )


def watch(engine: Any, record: Record) -> None:
    """Check every unmapping of an ``EngineCore``, and tell its workers the size of a page."""
    fenced = state.find(kvcached_api.manager_of(engine), Fenced)
    if fenced is None:
        return
    fence, scheduler = fenced.fence, fenced.scheduler
    planner = connectors.scheduler_of(scheduler.connector)
    if planner is not None:
        fenced.on_release.append(
            lambda pages: check_release(record(scheduler, planner), fence, pages)
        )
    start, end = fence.blocks_of_page(0)
    engine.model_executor.collective_rpc(tell_page_size, args=(end - start,))


def around_install(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Check every unmapping that the fence lets through; outside of the fence's patch."""
    wrapped(*args, **kwargs)
    watch(instance, stores)
