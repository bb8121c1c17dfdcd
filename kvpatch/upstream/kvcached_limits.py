"""What kvcached knows of an engine's limit, beside what its pool in /dev/shm says."""

from __future__ import annotations

import sys
from typing import Any


def must_end(error: BaseException) -> bool:
    """Whether an error of kvcached's says that its engine must not go on.

    What is mapped is then unknown, and a page may be another block's on one of the workers.
    """
    errors = sys.modules.get("kvcached.errors")
    return errors is not None and isinstance(error, errors.StateConsistencyError)


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
