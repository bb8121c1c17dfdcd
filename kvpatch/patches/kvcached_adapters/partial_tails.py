"""A prompt's boundary inside a block, which models with Mamba layers name for the prefix cache."""

from __future__ import annotations

from typing import Any

from kvpatch.patch import argument


def unless_it_has_passed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Name no boundary that a running request has already computed past.

    Once its state was copied, the request's own block is at a later token: under the boundary's
    hash it would be a state that no other prompt has.
    """
    from vllm.v1.request import RequestStatus

    request = argument(args, kwargs, 0, "request")
    computed = argument(args, kwargs, 1, "num_tokens") <= request.num_computed_tokens
    if request.status == RequestStatus.RUNNING and computed:
        return None
    return wrapped(*args, **kwargs)
