"""The weights of a worker on a CPU leave and come back, as those on a GPU do.

Their memory stays. What is computed while they are gone is no number, so that no test can pass by
weights that were still there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpatch import state
from kvpatch.patch import argument

_WEIGHTS = "weights"


@dataclass
class Gone:
    """Parameters and buffers that come back, by name (level 2: buffers); kept on the worker."""

    saved: dict[str, Any] = field(default_factory=dict)


def available(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Sleep mode is there. Wraps ``Platform.is_sleep_mode_available()``."""
    return True


def leave(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Let the weights leave. Wraps ``CPUWorker.sleep(level=1)``."""
    level = argument(args, kwargs, 0, "level") if args or "level" in kwargs else 1
    saved = state.of(instance, Gone).saved
    model = instance.model_runner.model
    for name, tensor in model.named_buffers():
        saved[name] = tensor.detach().clone()
    for name, tensor in model.named_parameters():
        if level == 1:
            saved[name] = tensor.detach().clone()
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)


def come_back(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Bring back what was saved. Wraps ``CPUWorker.wake_up(tags=None)``."""
    tags = argument(args, kwargs, 0, "tags") if args or "tags" in kwargs else None
    if tags is not None and _WEIGHTS not in tags:
        return
    saved = state.of(instance, Gone).saved
    model = instance.model_runner.model
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved:
            tensor.data.copy_(saved[name])
    saved.clear()


def discard(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Discard nothing: vLLM's allocator has no KV cache on a GPU either, where kvcached has it."""
