"""The connector's pool of CPU blocks stays vLLM's own.

The connector builds that pool with the class that manages the GPU's blocks, and
kvcached gives every instance of the class a pool on the GPU's memory. A CPU block
would then map a GPU page when it is taken, and unmap somebody's KV when it is freed.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from kvpatch.refusal import Refusal

_for_cpu: ContextVar[bool] = ContextVar("kvpatch_coordinator_for_cpu", default=False)


def around_cpu_coordinator(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Build the coordinator of the CPU blocks on vLLM's own block pool.

    Wraps ``get_kv_cache_coordinator`` as the connector's module names it; the GPU's
    coordinator is built through another name.

    Raises:
        Refusal: the pool is kvcached's all the same.
    """
    token = _for_cpu.set(True)
    try:
        coordinator = wrapped(*args, **kwargs)
    finally:
        _for_cpu.reset(token)
    if hasattr(coordinator.block_pool, "kv_cache_manager"):
        raise Refusal(
            "the connector's pool of CPU blocks is on kvcached's memory",
            "taking and freeing CPU blocks would map and unmap pages of the GPU",
            "report this with the log above, or set KVPATCH=0",
            code="KVP409",
        )
    return coordinator


def around_setup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Leave a coordinator of CPU blocks as vLLM made it.

    Wraps ``KVCacheCoordinator._setup_kvcached_coordinator``, by which kvcached puts
    its own pool in the place of vLLM's.
    """
    return None if _for_cpu.get() else wrapped(*args, **kwargs)
