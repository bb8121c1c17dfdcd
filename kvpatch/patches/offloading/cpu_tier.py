"""What the CPU tiers of a configuration take of the host's memory.

Where a tier is, by connector and release:

    OffloadingConnector up to 0.26     pinned by torch, by rank
    OffloadingConnector from 0.27 on   one file in /dev/shm, by all ranks; on ROCm up to 0.29
    with secondary tiers               one file in /dev/shm
    SimpleCPUOffloadConnector          ordinary memory that is registered, by rank

On a GPU its pages are pinned before the engine is ready, and in /dev/shm they are written, so that
all of it is taken then. On the host device ordinary memory is taken as blocks are first written.
The limit of locked memory (``ulimit -l``) is of no account: NVIDIA's driver pins pages itself, and
does not count them there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from kvpatch.environ import HOST_POOL
from kvpatch.supported import release_of
from kvpatch.upstream import connectors
from kvpatch.versions import Facts, Installed, Span

SHARED = Span("0.27")  # where OffloadingConnector's tier is in /dev/shm
NOT_ON_ROCM = Span("0.30")
IN_PARTS = Span("0.31")  # where a file of any size is registered, vllm-project/vllm#51081
# The largest range that one cudaHostRegister pins, measured in vllm-project/vllm#51080.
LARGEST_REGISTRATION = 512 << 30
SIMPLE_DEFAULT = 8 << 30
_TIERING = ("TieringOffloadingSpec", "HostTieringOffloadingSpec")
# Set in one of these, torch rounds up to this size only.
_ROUNDING = "pinned_max_round_threshold"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class CpuTier(NamedTuple):
    """The CPU tier of one connector."""

    asked: int  # bytes that are configured, of all ranks
    taken: int = 0  # bytes that it takes before the engine is ready, at least
    in_shm: bool = False  # whether it is a file in /dev/shm
    # Bytes of the largest range that is registered with CUDA at once; 0 if torch allocates it, or
    # it is registered in parts.
    registered: int = 0
    rounded: bool = False  # whether torch rounds each of its allocations up to a power of two


def of(config: Any, facts: Facts) -> list[CpuTier]:
    """Return the CPU tiers of a ``VllmConfig``, those in a MultiConnector too.

    With data parallelism each engine has tiers of the configured size. A size that cannot be read
    is vLLM's to refuse, and is left out.
    """
    ranks = int(config.parallel_config.world_size)
    found = []
    for leaf in connectors.leaves(config.kv_transfer_config):
        size = asked(leaf, ranks)
        if leaf.name == connectors.SIMPLE:
            found.append(_simple(size, ranks, facts))
        elif leaf.name == connectors.OFFLOADING:
            found.append(_offloading(size, leaf.extra, ranks, facts))
    return [tier for tier in found if tier.asked > 0] * engines(config)


def engines(config: Any) -> int:
    """Return how many engines a server has on this machine: its data parallel ranks here."""
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1:
        return 1
    return int(getattr(parallel, "data_parallel_size_local", parallel.data_parallel_size))


def asked(leaf: connectors.Leaf, ranks: int) -> int:
    """Return the configured bytes of a connector's CPU tier, of all ranks; 0 if unreadable."""
    try:
        if leaf.name == connectors.SIMPLE:
            each = int(leaf.extra.get("cpu_bytes_to_use", SIMPLE_DEFAULT)) // ranks
            return int(leaf.extra.get("cpu_bytes_to_use_per_rank", each)) * ranks
        if leaf.name == connectors.OFFLOADING:
            return int(leaf.extra.get("cpu_bytes_to_use", 0))
    except (TypeError, ValueError):
        pass
    return 0


def in_shm(tiers: Iterable[CpuTier]) -> int:
    """Return the bytes that tiers take in /dev/shm."""
    return sum(tier.taken for tier in tiers if tier.in_shm)


def in_all(tiers: Iterable[CpuTier]) -> int:
    """Return the bytes that tiers take of the machine's memory, wherever they are."""
    return sum(tier.taken for tier in tiers)


def is_shared(vllm: Installed, device: str = "cuda") -> bool:
    """Return whether OffloadingConnector's tier is in /dev/shm without secondary tiers."""
    release = release_of(vllm)
    rocm = "rocm" in vllm.text  # in the local version of vLLM's builds for it
    return device in ("cuda", "cpu") and release in SHARED and not (rocm and release in NOT_ON_ROCM)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below ``size``, as torch rounds."""
    return 1 << max(0, size - 1).bit_length()


def _simple(size: int, ranks: int, facts: Facts) -> CpuTier:
    each = size // ranks
    # Layer by layer in the other layout, and then of unknown size.
    pinned = facts.device == "cuda"
    registered = each if pinned and facts.contiguous else 0
    return CpuTier(each * ranks, each * ranks if pinned else 0, registered=registered)


def _offloading(asked: int, extra: dict[str, Any], ranks: int, facts: Facts) -> CpuTier:
    if HOST_POOL.read(facts.environment):  # has a rule of its own
        return CpuTier(asked)
    shared = extra.get("spec_name") in _TIERING or is_shared(facts.vllm, facts.device)
    if shared:
        whole = facts.device == "cuda" and release_of(facts.vllm) not in IN_PARTS
        return CpuTier(asked, asked, in_shm=True, registered=asked if whole else 0)
    if facts.device != "cuda":
        return CpuTier(asked)
    rounded = not any(_ROUNDING in facts.environment.get(name, "") for name in _ALLOCATOR)
    # In the other layout each layer is rounded, and how many there are is not known here.
    known = rounded and facts.contiguous
    taken = power_of_two(asked // ranks) * ranks if known else asked
    return CpuTier(asked, taken, rounded=rounded)
