"""Configurations whose CPU tiers do not fit into the host's memory."""

from __future__ import annotations

from typing import Any

from kvpatch.host_memory import HostMemory
from kvpatch.patches.offloading import cpu_tier
from kvpatch.rules import Rule
from kvpatch.sizes import readable
from kvpatch.versions import Facts

_LATE = "and the engine would end once the model is loaded"
_LESS = "ask for a smaller CPU tier (--kv-offloading-size or cpu_bytes_to_use)"


def memory_of(facts: Facts) -> HostMemory | None:
    """Return the free memory of the host, read once per check; None where it is not compared."""
    return facts.read("memory", facts.memory) if facts.memory is not None else None


def _taken(config: Any, facts: Facts) -> int:
    return cpu_tier.in_all(cpu_tier.of(config, facts))


def _over_shm(config: Any, facts: Facts) -> bool:
    memory = memory_of(facts)
    return (
        memory is not None
        and memory.shm is not None
        and cpu_tier.in_shm(cpu_tier.of(config, facts)) > memory.shm
    )


def _over_container(config: Any, facts: Facts) -> bool:
    memory = memory_of(facts)
    return (
        memory is not None
        and memory.container is not None
        and _taken(config, facts) > memory.container + memory.swap
    )


def _over_machine(config: Any, facts: Facts) -> bool:
    memory = memory_of(facts)
    return memory is not None and _taken(config, facts) > memory.available + memory.swap


def _over_one_registration(config: Any, facts: Facts) -> bool:
    tiers = cpu_tier.of(config, facts)
    return any(tier.registered >= cpu_tier.LARGEST_REGISTRATION for tier in tiers)


def _what(config: Any, facts: Facts, taken: int, free: int | None, where: str) -> str:
    asked = sum(tier.asked for tier in cpu_tier.of(config, facts))
    rounded = "" if taken <= asked else f" ({readable(asked)} before torch rounds it)"
    needed, left = readable(taken), readable(free or 0)
    if needed == left:  # as 64 GiB, where a few files are in a /dev/shm of 64 GiB
        needed, left = f"{taken} bytes", f"{free} bytes"
    return f"{_subject(config)} {needed}{rounded} and {where} has {left}"


def _subject(config: Any) -> str:
    count = cpu_tier.engines(config)
    return "the CPU tier takes" if count == 1 else f"the CPU tiers of {count} engines take"


def _shm(config: Any, facts: Facts) -> str:
    memory, taken = memory_of(facts), cpu_tier.in_shm(cpu_tier.of(config, facts))
    return _what(config, facts, taken, memory and memory.shm, "/dev/shm") + " free"


def _container(config: Any, facts: Facts) -> str:
    memory = memory_of(facts)
    free = memory and memory.container
    where = "the memory limit of this container"
    return _what(config, facts, _taken(config, facts), free, where) + " left"


def _machine(config: Any, facts: Facts) -> str:
    memory = memory_of(facts)
    free = memory and memory.available
    return _what(config, facts, _taken(config, facts), free, "this machine") + " available"


def _tight(config: Any, facts: Facts) -> str:
    memory, taken = memory_of(facts), _taken(config, facts)
    if memory is None or taken == 0:
        return ""
    if taken <= memory.free:
        return ""
    return (
        f"{_subject(config)} {readable(taken)} and {readable(memory.free)} are available: the "
        f"kernel will swap, or end a process; {_LESS}"
    )


def _rounding(config: Any, facts: Facts) -> str:
    tiers = [tier for tier in cpu_tier.of(config, facts) if tier.rounded]
    if not tiers or memory_of(facts) is None:
        return ""
    asked, taken = sum(tier.asked for tier in tiers), cpu_tier.in_all(tiers)
    if taken > asked:
        return (
            f"the CPU tier of {readable(asked)} takes {readable(taken)}, because torch rounds "
            "pinned memory of each rank up to a power of two; ask for a power of two per rank, "
            "or install vLLM 0.27.1"
        )
    if not facts.contiguous:
        return (
            f"the CPU tier of {readable(asked)} may take up to {readable(2 * asked)}, because "
            "torch rounds pinned memory of each layer up to a power of two; install vLLM 0.27.1, "
            "or see that twice the memory is free"
        )
    return ""


RULES = (
    Rule(
        "KVP336",
        "a CPU tier that does not fit into the free space of /dev/shm, where vLLM keeps it from "
        "0.27 on, and with secondary tiers in every release",
        _over_shm,
        _shm,
        f"vLLM keeps the tier in a file there, {_LATE}",
        "start the container with a larger /dev/shm (docker run --shm-size), free some of it "
        f"(kvpatch doctor lists leftovers), or {_LESS}",
    ),
    Rule(
        "KVP337",
        "a CPU tier that does not fit into the memory limit of the container",
        _over_container,
        _container,
        f"all of the tier is written at the start, {_LATE}, killed for its memory",
        f"raise the limit (docker run --memory, limits.memory of a pod), or {_LESS}",
    ),
    Rule(
        "KVP338",
        "a CPU tier that does not fit into the available memory of the machine",
        _over_machine,
        _machine,
        f"all of the tier is written at the start, {_LATE}",
        _LESS,
        warns=lambda config, facts: _rounding(config, facts) or _tight(config, facts),
    ),
    Rule(
        "KVP339",
        "a CPU tier that is registered with CUDA in a range of 512 GiB or more: of "
        "SimpleCPUOffloadConnector per rank in kvcached's contiguous layout, and in /dev/shm "
        "before vLLM 0.31",
        _over_one_registration,
        "the CPU tier is one range of 512 GiB or more",
        "one cudaHostRegister pins less than that (vllm-project/vllm#51080), and a failed one "
        "ends the engine, or leaves an error that the next call of CUDA reports",
        "ask for less than 512 GiB, or use OffloadingConnector on vLLM 0.31.0 or later, which "
        "registers in parts",
    ),
)
