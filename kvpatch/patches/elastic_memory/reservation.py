"""Block 0, which kvcached's pool reserves in a thread of its own while the engine starts."""

from __future__ import annotations

import threading
from typing import Any


def around_wait(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let the pool get ready while a request waits for that.

    With asynchronous scheduling the request holds the lock that the reservation of block 0 needs.
    """
    if hasattr(instance._lock, "_is_owned"):  # synchronous scheduling has no lock
        unlocked = threading.Condition(instance._lock)
        while not instance._post_init_done.is_set():
            with unlocked:
                unlocked.wait(0.01)
    return wrapped(*args, **kwargs)
