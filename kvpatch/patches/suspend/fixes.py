"""Suspension on vLLM before 0.30: stores of SimpleCPUOffloadConnector have no events."""

from __future__ import annotations

from typing import Any

from kvpatch.patches.suspend import simple


def around_store_specs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Add the blocks of a spill to the store of a step.

    Wraps ``SimpleCPUOffloadScheduler.prepare_store_specs``, which returns device blocks, CPU
    blocks and requests.
    """

    def with_events(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*wrapped(*args, **kwargs), None)

    return simple.around_store_specs(with_events, instance, args, kwargs)[:3]
