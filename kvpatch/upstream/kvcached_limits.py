"""What kvcached knows of an engine's limit, beside what its pool in /dev/shm says."""

from __future__ import annotations

import sys
from typing import Any

from kvpatch.upstream import kvcached_api


def must_end(error: BaseException) -> bool:
    """Whether an error of kvcached's says that its engine must not go on.

    What is mapped is then unknown, and a page may be another block's on one of the workers.
    """
    errors = sys.modules.get("kvcached.errors")
    return errors is not None and isinstance(error, errors.StateConsistencyError)


def revision(manager: Any) -> int:
    """Return the number of the last limit that was set by revision; -1 without one."""
    return int(getattr(manager, "_memory_limit_revision", -1))


def of_revision(manager: Any) -> int:
    """Return the last limit that was set by revision, in bytes of the K or V of one layer."""
    layers = manager.num_layers * manager.num_kv_buffers
    return int(manager._memory_limit_effective_bytes // layers)


def publish_revision(manager: Any, over: int) -> int:
    """Write the limit that was set by revision to the pool; on the engine's thread.

    Args:
        manager: its page manager.
        over: what the pool said when that limit was set. What it has said since is a later limit.

    Returns:
        The later limit that the pool keeps; 0 if it has that of the revision now.

    Raises:
        OSError: the pool cannot be written.
    """
    # 0 is no limit there.
    size = max(int(manager._memory_limit_effective_bytes), kvcached_api.page_bytes(manager))
    now = kvcached_api.limit_in_pool(manager)
    if now and now not in (over, size):
        return now
    kvcached_api.write_limit(manager, size)
    return 0


def map_no_more(manager: Any, size: int) -> None:
    """Let an engine map no page more, as kvcached does while it shrinks to a limit by itself.

    On any thread: a free on the engine's own takes ``in_shrink`` for the word that there is a goal.

    Args:
        manager: its page manager.
        size: the limit, in bytes of the K or V of one layer.
    """
    with manager._lock:  # none where kvcached expects one thread
        manager.target_num_blocks = size // manager.block_mem_size
        manager.in_shrink = True
