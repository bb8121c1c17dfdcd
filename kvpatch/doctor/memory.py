"""The host's memory: what limits a CPU tier, and how large one may be."""

from __future__ import annotations

import resource
from collections.abc import Mapping

from kvpatch import cgroup, host_memory, versions
from kvpatch.cgroup import Limit
from kvpatch.doctor import machine
from kvpatch.doctor.finding import Finding, Topic
from kvpatch.host_memory import HostMemory
from kvpatch.patches.offloading import cpu_tier
from kvpatch.sizes import readable
from kvpatch.versions import Installed

TOPIC = Topic("host memory")
LEAST = 1 << 30  # of a CPU tier that is of use
_MORE = (
    "give the container more: its memory limit, and /dev/shm (docker run --shm-size 64g) where "
    "the tier is there"
)


def check(settings: Mapping[str, str]) -> list[Finding]:
    """Report the limits of this machine, and what the installed vLLM could have in them."""
    memory = host_memory.here()
    installed = versions.installed("vllm")
    device = "cuda" if machine.nvidia_driver() else "cpu"
    return [
        container(cgroup.tightest()),
        available(memory),
        locked(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        *(fits(memory, vllm, device) for vllm in installed[:1]),
    ]


def container(limit: Limit | None) -> Finding:
    """Return the memory limit of the container."""
    if limit is None:
        return TOPIC.ok("no memory limit of a container")
    what = f"the memory limit of this container is {readable(limit.limit)}, with "
    return TOPIC.ok(f"{what}{readable(limit.free)} left")


def available(memory: HostMemory) -> Finding:
    """Return the free memory of the machine."""
    what = f"the machine has {readable(memory.available)} of memory available"
    return TOPIC.ok(f"{what}, and {readable(memory.swap)} of swap")


def locked(limit: int) -> Finding:
    """Return the limit of locked memory, which is often taken for the reason of a failure."""
    if limit == resource.RLIM_INFINITY:
        return TOPIC.ok("locked memory is not limited")
    return TOPIC.ok(
        f"locked memory is limited to {readable(limit)} (ulimit -l), which is of no account to a "
        "CPU tier: NVIDIA's driver does not count what it pins"
    )


def fits(memory: HostMemory, vllm: Installed, device: str) -> Finding:
    """Return how large a CPU tier may be before an engine is refused or slowed."""
    free = memory.free
    ordinary = f"{readable(free)} with SimpleCPUOffloadConnector"
    if cpu_tier.is_shared(vllm, device):
        room = free if memory.shm is None else min(free, memory.shm)
        what = f"{readable(room)} with OffloadingConnector, in /dev/shm, or of {ordinary}"
    elif device == "cuda":
        room = 1 << max(0, free.bit_length() - 1)
        what = (
            f"{readable(room)} with OffloadingConnector and one rank, whose memory torch rounds "
            f"up to a power of two, or of {ordinary}"
        )
    else:
        room, what = free, f"{readable(free)}"
    where = f"vLLM {vllm.public} has room for a CPU tier of up to {what}"
    return TOPIC.warning(where, _MORE) if room < LEAST else TOPIC.ok(where)
