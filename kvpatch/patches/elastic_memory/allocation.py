"""Failed allocations: the set-up of a worker or an engine, and the blocks of a request.

Another engine can map the last page after the scheduler has counted it as free. A request
with several KV cache groups then gets new blocks for one group and none for the next. The
retry fails on the blocks of the first attempt: prefix caching asserts that the request is
new, and a worker receives only the blocks of the last attempt.
"""

from __future__ import annotations

from typing import Any

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.refusal import Refusal

_setup_error: Exception | None = None


def remember_setup_error(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Record the error of a failed worker set-up, which kvcached only logs."""
    global _setup_error
    _setup_error = None
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        _setup_error = error
        raise


def require_setup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a worker in which kvcached's set-up failed, of which kvcached only warns."""
    result = wrapped(*args, **kwargs)
    if isinstance(_setup_error, Refusal):
        raise _setup_error
    if _setup_error is not None:
        raise _refuse_setup(_setup_error) from _setup_error
    return result


def around_worker_setup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Refuse a worker whose set-up fails where kvcached raises the error; engines call it too."""
    try:
        wrapped(*args, **kwargs)
    except Refusal:
        raise
    except Exception as error:
        if not kwargs.get("is_worker", args[3] if len(args) > 3 else False):
            raise
        raise _refuse_setup(error) from error


def _refuse_setup(error: Exception) -> Refusal:
    return Refusal(
        "kvcached could not be set up in this worker",
        f"it failed with {type(error).__name__}: {error}",
        "fix that error, or set KVPATCH=0",
        code="KVP403",
    )


def require_coordinator(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse an engine whose block pool kvcached could not replace, of which it only warns."""
    try:
        return wrapped(*args, **kwargs)
    except RuntimeError:
        raise
    except Exception as error:
        raise Refusal(
            "kvcached cannot manage this model's KV cache",
            f"it failed with {type(error).__name__}: {error}",
            "fix that error, or set KVPATCH=0",
            code="KVP404",
        ) from error


class Attempt:
    """kvcached's bookkeeping of one allocation, kept on vLLM's ``KVCacheManager``."""

    def __init__(self, coordinator: Any) -> None:
        from kvcached.integration.vllm.allocation_attempt import AllocationAttempt

        self.blocks = AllocationAttempt(coordinator)


def around_allocate_slots(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Roll back the blocks of a failed allocation, as kvcached does on some releases."""
    kept = state.find(instance, Attempt) or state.attach(instance, Attempt(instance.coordinator))
    attempt = kept.blocks
    attempt.begin(argument(args, kwargs, 0, "request").request_id)
    blocks = None
    try:
        blocks = wrapped(*args, **kwargs)
        return blocks
    finally:
        if blocks is None:
            attempt.rollback()
        attempt.end()
