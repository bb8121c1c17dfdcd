"""Admitting loads in an order that cannot deadlock.

A request whose blocks are loaded from the primary tier holds device memory while it waits.
vLLM stops scheduling at the first request that it has no memory for. A request that was
deferred for a secondary tier, and then needs that memory, can be in the queue ahead of the
requests that hold it: vLLM never schedules those again, and makes no progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpatch import state
from kvpatch.patches.secondary_tiers import weights


@dataclass
class Step:
    """Whether a request was deferred for a tier in this step; kept on the connector's scheduler."""

    passed_over: bool = False


def around_matched_tokens(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Start no load behind a request that was deferred (None for its tokens) in the same step.

    The first call for a request: what it computes depends on the weights as they are now.
    """
    weights.usable(getattr(getattr(instance, "manager", None), "secondary_tiers", ()))
    tokens, loads = wrapped(*args, **kwargs)
    if tokens is None:
        state.of(instance, Step).passed_over = True
    elif loads and state.of(instance, Step).passed_over:
        return None, False
    return tokens, loads


def around_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Start a new step, in its last call to the connector."""
    state.of(instance, Step).passed_over = False
    return wrapped(*args, **kwargs)
