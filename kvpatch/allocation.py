"""Keeping the KV caches on kvcached's memory, and refusing when they are not."""

from __future__ import annotations

from typing import Any

from kvpatch.errors import Refusal

_setup_error: Exception | None = None


def keep_elastic(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Answer that no cross-layer KV cache is wanted.

    Wraps ``use_uniform_kv_cache``. True would make vLLM allocate one
    ``torch.zeros`` for all layers, which kvcached never sees. Only called with
    kvcached on: activation refuses otherwise. The speed of whole-block copies is
    kept by registering whole blocks, see ``geometry``.
    """
    return False


def remember_setup_error(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Keep the reason of a failed worker set-up, which kvcached only logs."""
    global _setup_error
    _setup_error = None
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        _setup_error = error
        raise


def require_setup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Stop a worker that kvcached has given up on.

    Wraps ``GPUModelRunner.__init__`` over kvcached's wrapper, which turns a failure
    into a warning; the engine would die at its first request.
    """
    result = wrapped(*args, **kwargs)
    if _setup_error is not None:
        raise Refusal(
            "kvcached could not be set up in this worker",
            f"it failed with {type(_setup_error).__name__}: {_setup_error}",
            "mend that cause, or set KVPATCH=0",
            code="KVP403",
        ) from _setup_error
    return result


def require_coordinator(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Stop an engine whose block pool kvcached could not replace.

    Wraps ``KVCacheCoordinator._setup_kvcached_coordinator``, whose errors kvcached
    turns into a warning unless they are RuntimeErrors, as a refusal is.
    """
    try:
        return wrapped(*args, **kwargs)
    except RuntimeError:
        raise
    except Exception as error:
        raise Refusal(
            "kvcached cannot manage this model's KV cache",
            f"it failed with {type(error).__name__}: {error}",
            "mend that cause, or set KVPATCH=0",
            code="KVP404",
        ) from error
