"""Two models on one device, with peaks in turn.

In a cycle the first model has its peak, then the second, then the first model's
conversations return. On static memory each has half of the device permanently. On elastic
memory each may map all of it, and keeps nothing of a finished request on the device
(``KVCACHED_MAX_CACHED_TOKENS=0``), with kvpatch and without; an arm with kvcached's own
default, which keeps some, runs beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from harness.bench import arms as known
from harness.bench.arms import Arm
from harness.bench.loads import peak
from harness.bench.measure import run
from harness.bench.memory import MappedMemory
from harness.bench.one_model import turns
from harness.bench.sizes import BLOCK_BYTES, BLOCK_TOKENS, LAYERS, PAGE_BLOCKS, Size
from harness.bench.starting import Starter
from harness.serve import SPARE_PAGES, Server

KEEPS_NOTHING = {"KVCACHED_MAX_CACHED_TOKENS": "0"}
FIRST, SECOND = "first", "second"


@dataclass(frozen=True)
class Shared:
    """An arm, and whether its finished prompts leave the device at once."""

    arm: Arm
    keeps_nothing: bool = False

    @property
    def name(self) -> str:
        """The arm's name, with what is kept where that differs."""
        if not self.arm.elastic:
            return f"{self.arm.name}, halves"
        return self.arm.name if self.keeps_nothing else f"{self.arm.name}, keeps 16000 tokens"


ALL = (
    Shared(known.PLAIN),
    Shared(known.STATIC),
    Shared(known.KVCACHED),
    Shared(known.KVCACHED, keeps_nothing=True),
    Shared(known.KVPATCH, keeps_nothing=True),
)


def device_blocks(size: Size) -> int:
    """Return the blocks of the device: one peak fits with a quarter to spare, two do not.

    What both engines keep when they are idle comes on top: the page of block 0, which is
    never given back, and kvcached's spare pages.
    """
    longest = size.prompt // BLOCK_TOKENS + 2 + -(-size.answer // BLOCK_TOKENS)
    pages = -(-size.peak * longest * 5 // 4 // PAGE_BLOCKS)
    pages += 2 * (1 + int(SPARE_PAGES["KVCACHED_MAX_RESERVED_PAGES"]))
    return (pages + pages % 2) * PAGE_BLOCKS


def measured(shared: Sequence[Shared], starter: Starter) -> dict[str, Any]:
    """Run every arm, and return the part of a run with two models."""
    blocks = device_blocks(starter.size)
    # A tier holds one model's prompts, and a quarter more.
    size = replace(starter.size, tier_blocks=blocks)
    cycles: dict[str, list[dict[str, Any]]] = {one.name: [] for one in shared}
    with ExitStack() as stack:
        pairs = {
            one: _start(one, f"two{at}", size, starter, stack) for at, one in enumerate(shared)
        }
        for repeat in range(size.neighbour_repeats):
            for one in turns(shared, repeat):
                starter.screen.live(f"repeat {repeat + 1}, {one.name}")
                cycle = _cycle(one, pairs[one], size, starter, repeat)
                cycles[one.name].append(cycle)
                starter.screen.say(
                    f"repeat {repeat + 1} of {size.neighbour_repeats}, {one.name}: "
                    f"{cycle['given_share']:.0%} given to the neighbour, "
                    f"{cycle['served_share']:.0%} of what returns served"
                )
    return {"device_bytes": blocks * BLOCK_BYTES, "cycles": cycles}


def _start(
    one: Shared, slug: str, size: Size, starter: Starter, stack: ExitStack
) -> dict[str, Server]:
    """Start a server of each model on one device; its tier is as large as the device."""
    device = size.tier_blocks
    # Room for the page that an unmapped address shows, one in each layer and engine.
    environment = {"KVPATCH_HOST_DEVICE": str(device * BLOCK_BYTES + 2 * LAYERS * (2 << 20))}
    if one.arm.elastic:
        # vLLM's share of a device is of its whole; what is free decides.
        environment["KVCACHED_GPU_UTILIZATION"] = "1.0"
    if one.keeps_nothing:
        environment |= KEEPS_NOTHING
    blocks = device if one.arm.elastic else device // 2
    servers = {}
    for model, name in (("a", FIRST), ("b", SECOND)):
        kind = known.kind(one.arm, size, blocks, f"{slug}{model}", environment)
        servers[name] = starter.start(stack, kind, model, device=slug)
    return servers


def _cycle(
    one: Shared, servers: dict[str, Server], size: Size, starter: Starter, repeat: int
) -> dict[str, Any]:
    """One peak of each model, and the return of the first one's conversations."""
    folder = starter.folders[servers[FIRST]]
    sent = {
        "first_peak": (FIRST, peak(size, "a", repeat)),
        "second_peak": (SECOND, peak(size, "b", repeat)),
        "first_returns": (FIRST, peak(size, "a", repeat, returning=True)),
    }
    found: dict[str, Any] = {}
    with MappedMemory(str(folder), servers) as memory:
        for phase, (name, load) in sent.items():
            memory.phase(phase)
            found[phase] = run(load, servers[name], folder)
        memory.phase("end")
        for server in servers.values():
            server.reset_caches()
    held = 0 if one.arm.elastic else size.tier_blocks // 2 * BLOCK_BYTES
    used, kept = given(
        memory.within("first_peak"), memory.within("second_peak"), held_for_good=held
    )
    return {
        "used_bytes": used,
        "given_share": round(1 - kept / used, 4) if used else 0.0,
        "served_share": served(found["first_returns"], sent["first_peak"][1].prompts),
        "phases": found,
        **({"timeline": memory.timeline()} if repeat == 0 else {}),
    }


def given(
    first_peak: Sequence[dict[str, int]],
    second_peak: Sequence[dict[str, int]],
    held_for_good: int = 0,
) -> tuple[int, int]:
    """Return what the first model used at its peak, and still has at the second's.

    Args:
        first_peak, second_peak: samples of mapped bytes by model.
        held_for_good: bytes of static memory, instead of samples.
    """
    if held_for_good:
        return held_for_good, held_for_good
    used = max((sample[FIRST] for sample in first_peak), default=0)
    at_peak = max(second_peak, key=lambda sample: sample[SECOND], default={FIRST: 0})
    return used, at_peak[FIRST]


def served(returned: dict[str, Any], prompts: Sequence[Any]) -> float:
    """Return the share of the prompts' tokens that was not recomputed."""
    tokens: dict[str, int] = returned["prompt_tokens"]
    sent: int = sum(prompt.tokens for prompt in prompts)
    return round((tokens["from_cache"] + tokens["from_tier"]) / sent, 4)
