"""Suspension on vLLM before 0.30, where SimpleCPUOffloadConnector's stores have no events, and CPU
blocks their hashes before the copy.
"""

from __future__ import annotations

from typing import Any

from kvpatch.patches.suspend import simple


def around_store_specs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """As ``simple.around_store_specs``; vLLM looks for the hash on a copied CPU block."""

    def with_events(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*wrapped(*args, **kwargs), None)

    blocks, places, requests, _ = simple.around_store_specs(with_events, instance, args, kwargs)
    for block, place in zip(blocks, places, strict=True):
        hashed = instance._gpu_block_pool.blocks[block].block_hash
        instance.cpu_block_pool.blocks[place]._block_hash = hashed
    return blocks, places, requests
