"""What kvcached knows of an engine's limit, beside what its pool in /dev/shm says."""

from __future__ import annotations

import sys
from typing import Any


def must_end(error: BaseException) -> bool:
    """Whether an error of kvcached's ends its engine: what is mapped is then unknown."""
    errors = sys.modules.get("kvcached.errors")
    return errors is not None and isinstance(error, errors.StateConsistencyError)


def map_no_more(manager: Any, size: int) -> None:
    """Let an engine map no page more, as kvcached does while it shrinks to a limit by itself.

    On any thread: a free on the engine's own takes ``in_shrink`` for the word that there is a goal.
    The limit is in bytes of the K or V of one layer.
    """
    with manager._lock:  # none where kvcached expects one thread
        manager.target_num_blocks = size // manager.block_mem_size
        manager.in_shrink = True
