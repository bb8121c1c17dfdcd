"""vllm-ascend's worker registers K and V of kvcached's memory, each as a region of its own."""

from __future__ import annotations

from typing import Any

from kvpatch.patches.simple_offload import registration


def around_register(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions; of the storage of each vllm-ascend takes one region."""
    registration.around_register(wrapped, instance, args, kwargs)
