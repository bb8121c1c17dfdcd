"""The connector's pool of CPU blocks stays vLLM's own, though its class is the GPU's."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from kvpatch.refusal import Refusal

_for_cpu: ContextVar[bool] = ContextVar("kvpatch_coordinator_for_cpu", default=False)


def around_cpu_coordinator(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Create the coordinator of the CPU blocks with vLLM's own block pool, or refuse."""
    token = _for_cpu.set(True)
    try:
        coordinator = wrapped(*args, **kwargs)
    finally:
        _for_cpu.reset(token)
    if hasattr(coordinator.block_pool, "kv_cache_manager"):
        raise Refusal(
            "the connector's CPU blocks are in kvcached's pool",
            "allocating and freeing CPU blocks would map and unmap pages of the GPU",
            "report this with the log above, or set KVPATCH=0",
            code="KVP409",
        )
    return coordinator


def around_setup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Leave a coordinator of CPU blocks its pool, where kvcached replaces it by its own."""
    return None if _for_cpu.get() else wrapped(*args, **kwargs)
