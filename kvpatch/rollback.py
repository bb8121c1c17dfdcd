"""An allocation that fails in the middle leaves nothing behind.

A neighbour can take the last page after the scheduler has counted it. A model with
several KV cache groups then has new blocks for one group and none for the next. The
request is tried again, and what the first try left is in the way: prefix caching
asserts that the request is new, and a worker hears of the blocks of the last try only.
"""

from __future__ import annotations

from typing import Any

from kvpatch.calls import argument


def around_allocate_slots(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Take back what a failed allocation has given, as kvcached does on some releases.

    Wraps ``KVCacheManager.allocate_slots``. The bookkeeping is kvcached's own.
    """
    from kvcached.integration.vllm.allocation_attempt import AllocationAttempt

    attempt = getattr(instance, "kvpatch_attempt", None)
    if attempt is None:
        attempt = instance.kvpatch_attempt = AllocationAttempt(instance.coordinator)
    attempt.begin(argument(args, kwargs, 0, "request").request_id)
    blocks = None
    try:
        blocks = wrapped(*args, **kwargs)
        return blocks
    finally:
        if blocks is None:
            attempt.rollback()
        attempt.end()
