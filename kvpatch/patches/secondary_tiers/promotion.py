"""Promoting blocks from a secondary tier so that every request makes progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.upstream.vllm_api import chunks_of, lookup_results


@dataclass
class Promoted:
    """The blocks that were promoted for one request; kept on vLLM's context of the request."""

    keys: set[Any] = field(default_factory=set)


def around_promotion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Promote a block once per request, and no more blocks than the primary tier holds.

    A prompt with more would evict its first blocks for its last, promote the first again, and never
    run; nor would one with a damaged file, which 0.27 requests in every step.
    """
    key = argument(args, kwargs, 1, "key")
    context = argument(args, kwargs, 2, "req_context")
    promoted = state.of(context, Promoted)
    if key in promoted.keys or len(promoted.keys) >= chunks_of(instance.primary_tier, "_num_{}"):
        return False
    if not wrapped(*args, **kwargs):
        return False
    promoted.keys.add(key)
    return True


def around_lookup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Treat blocks that a late tier has not promoted yet as misses, which vLLM would wait for."""
    miss, later = lookup_results()
    result = wrapped(*args, **kwargs)
    if result in later and any(getattr(tier, "late", False) for tier in instance.secondary_tiers):
        return miss
    return result
