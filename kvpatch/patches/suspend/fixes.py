"""Suspension on vLLM before 0.30, where SimpleCPUOffloadConnector's stores have no events, and CPU
blocks their hashes before the copy.
"""

from __future__ import annotations

from typing import Any

from kvpatch.patches.suspend import simple


def around_store_specs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Add the blocks of a spill to the store of a step.

    Wraps ``SimpleCPUOffloadScheduler.prepare_store_specs``, which returns device blocks, CPU
    blocks and requests. When the copy has completed, vLLM looks for the hash on the CPU block.
    """

    def with_events(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*wrapped(*args, **kwargs), None)

    blocks, places, requests, _ = simple.around_store_specs(with_events, instance, args, kwargs)
    for block, place in zip(blocks, places, strict=True):
        hashed = instance._gpu_block_pool.blocks[block].block_hash
        instance.cpu_block_pool.blocks[place]._block_hash = hashed
    return blocks, places, requests
