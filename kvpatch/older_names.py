"""vLLM's offloading classes, which moved from module to module up to 0.25."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = ("base", "spec", "worker.worker", "cpu.common", "mediums", "cpu.spec", "cpu")


def find(name: str) -> Any:
    """Return a class of ``vllm.v1.kv_offload`` from the module where this release has it.

    Raises:
        ImportError: it has none of that name.
    """
    for home in _HOMES:
        try:
            module = import_module(f"vllm.v1.kv_offload.{home}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"vllm.v1.kv_offload has no {name}")
