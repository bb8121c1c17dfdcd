"""SimpleCPUOffloadConnector up to vLLM 0.31: faults that later releases have fixed."""

from __future__ import annotations

from typing import Any

from kvpatch.patch import argument


def around_match(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Load nothing for a request that asks to compute every token, as from 0.30 on.

    See ``offloading.legacy``. The connector is not asked: it would keep the hit.
    """
    if argument(args, kwargs, 0, "request").skip_reading_prefix_cache:
        return 0, False
    return wrapped(*args, **kwargs)


def before_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Release the hits of requests that wait, which look them up again.

    A pinned one is enough for the tier to refuse the reset, and to serve blocks of old weights.
    """
    for hit in instance._pending_cpu_hits.values():
        instance._free_pending_cpu_hit(hit)
    instance._pending_cpu_hits.clear()
    return wrapped(*args, **kwargs)
