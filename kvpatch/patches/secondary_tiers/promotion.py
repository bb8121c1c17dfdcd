"""Bringing blocks up from a tier, in such a way that every request gets on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.upstream.vllm_api import chunks_of, lookup_results


@dataclass
class Promoted:
    """The blocks that were brought up for one request; kept in vLLM's context of it."""

    keys: set[Any] = field(default_factory=set)


def around_promotion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Bring a block up once for a request, and no more than the CPU tier holds.

    Wraps ``TieringOffloadingManager._initiate_promotion(tier_idx, key, req_context)``, up
    to 0.27 of the tier itself. A prompt with more blocks than the CPU tier would push out
    its first blocks for its last, then bring up the first again, and never run. Nor would
    one with a block whose file is damaged, for which 0.27 asks in every step.
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
    """Let a request go on without the blocks that a late tier still owes.

    Wraps ``TieringOffloadingManager.lookup``, whose "later" would keep the request
    waiting.
    """
    miss, later = lookup_results()
    result = wrapped(*args, **kwargs)
    if result in later and any(getattr(tier, "late", False) for tier in instance.secondary_tiers):
        return miss
    return result
