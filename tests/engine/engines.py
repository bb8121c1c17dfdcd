"""What every driver does with an engine in its own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvpatch.hostdevice import streams


def come_to_rest(scheduler: Any, step: Callable[[], Any], tiers: Sequence[Any] = ()) -> None:
    """Step until the copies of the last requests have ended and were reported.

    Also those to ``tiers``: a CPU tier all of whose blocks are still being written out
    takes no other block in, and what is asked for then is a miss.
    """
    for _ in range(200):
        if not scheduler.has_requests():
            return
        step()
        streams.synchronize()
        for tier in tiers:
            tier.drain_jobs()
    raise AssertionError("the engine did not come to rest in 200 steps")


def tiers_behind(planner: Any) -> Sequence[Any]:
    """The tiers behind the CPU tier of an OffloadingConnector's scheduler; None has none."""
    return getattr(planner.manager, "secondary_tiers", ()) if planner else ()


def parts_of(cache: Any) -> Sequence[Any]:
    """The tensors of a layer's KV cache: one, or those of a state."""
    return cache if isinstance(cache, list | tuple) else [cache]


def block_of(cache: Any, block: int) -> Any:
    """One block of a layer's KV tensor, contiguous."""
    # Up to 0.23 K is apart from V, outside the blocks.
    part = cache[:, block] if len(cache) == 2 else cache[block]
    return part.contiguous()
