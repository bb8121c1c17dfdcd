"""The host device's copies for older vLLM.

up to 0.28  SimpleCPUOffloadConnector resolves the batched copy alone, without its attributes
up to 0.18  handlers take tensors by layer
"""

from __future__ import annotations

from typing import Any

from kvpatch.hostdevice.copies import DeviceTensor, memcpy_batch
from kvpatch.patch import argument


def layers_on_device(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Give vLLM's handlers, whose ``gpu_caches`` has one for each layer, tensors on a device."""
    caches = argument(args, kwargs, 3, "gpu_caches")
    moved = {name: cache.as_subclass(DeviceTensor) for name, cache in caches.items()}
    if "gpu_caches" in kwargs:
        return wrapped(*args, **{**kwargs, "gpu_caches": moved})
    return wrapped(*args[:3], moved, *args[4:], **kwargs)


def batched_copies(original: Any) -> Any:
    """Replace ``_resolve_batch_memcpy``, which returns the function."""
    return lambda: memcpy_batch
