"""Engines in this process, for the models of ``model_cache``."""

from typing import Any


def engine(model: str, **more: Any) -> Any:
    """Return an ``LLM`` in float32, which gives the same tokens each time.

    Args:
        model: its folder.
        more: arguments of ``LLM``.
    """
    from vllm import LLM

    shared = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "enforce_eager": True}
    return LLM(model, dtype="float32", seed=0, **shared, **more)
