"""One model on a device of its own: every arm and load, repeat by repeat.

All servers run from the beginning, because a start takes longer than a load. Only one of
them has requests at a time; the others are idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from harness.bench import arms as known
from harness.bench.arms import Arm
from harness.bench.loads import Load
from harness.bench.measure import run
from harness.bench.memory import MappedMemory
from harness.bench.sizes import BLOCK_BYTES, Size
from harness.bench.starting import Starter
from harness.serve import Server

T = TypeVar("T")


def turns(arms: Sequence[T], repeat: int) -> list[T]:
    """Return the order of a repeat: it begins with another arm, and every other is reversed.

    A machine that gets slower or faster meanwhile then favours no arm.
    """
    at = 2 * (repeat // 2) % len(arms)
    order = [*arms[at:], *arms[:at]]
    return order[::-1] if repeat % 2 else order


@dataclass
class OneModel:
    """The part of a run with one model.

    Attributes:
        arms: what is compared.
        starter: starts servers.
        loads: by their names.
        slug: of its servers, which no other part has.
    """

    arms: Sequence[Arm]
    starter: Starter
    loads: Mapping[str, Callable[[Size, int], Load]]
    slug: str

    def __post_init__(self) -> None:
        self._size, self._screen = self.starter.size, self.starter.screen
        self.result: dict[str, Any] = {"arms": {}, "loads": {}}

    def measure(self) -> dict[str, Any]:
        """Start every arm, run every load, and return the result."""
        with ExitStack() as stack:
            servers = {arm: self._start(arm, number, stack) for number, arm in enumerate(self.arms)}
            for repeat in range(self._size.repeats):
                self._repeat(repeat, servers)
            for arm, server in servers.items():
                self.result["arms"][arm.name]["host_bytes_at_end"] = server.memory()
        return self.result

    def _start(self, arm: Arm, number: int, stack: ExitStack) -> Server:
        kind = known.kind(arm, self._size, self._size.blocks, f"{self.slug}{number}")
        server = self.starter.start(stack, kind)
        self.result["arms"][arm.name] = {
            "elastic": arm.elastic,
            "offloads": arm.offloads,
            "start_seconds": round(server.start_seconds or 0.0, 1),
            "device_bytes_held": 0 if arm.elastic else self._size.blocks * BLOCK_BYTES,
            "host_bytes_at_start": server.memory(),
            "processes": sorted(one.name() for one in server.processes()),
            "settings": known.settings(kind),
        }
        return server

    def _repeat(self, repeat: int, servers: dict[Arm, Server]) -> None:
        for name, make in self.loads.items():
            load = make(self._size, repeat)
            rows = self.result["loads"].setdefault(
                name,
                {
                    "what": load.what,
                    "requests": len(load.prompts),
                    "prompt_tokens": sum(prompt.tokens for prompt in load.prompts),
                    "together": load.together,
                    "runs": {arm.name: [] for arm in self.arms},
                },
            )["runs"]
            for arm in turns(self.arms, repeat):
                self._screen.live(f"repeat {repeat + 1}, {name}: {arm.name}")
                rows[arm.name].append(self._run(load, servers[arm]))
            self._screen.say(
                f"repeat {repeat + 1} of {self._size.repeats}, {name}: "
                + ", ".join(
                    f"{arm.name} {rows[arm.name][-1]['total_tokens_per_second']:,.0f}"
                    for arm in self.arms
                )
                + " tok/s"
            )

    def _run(self, load: Load, server: Server) -> dict[str, Any]:
        folder = self.starter.folders[server]
        with MappedMemory(str(folder), {"server": server}) as memory:
            found = run(load, server, folder, memory)
            # The next load finds an empty cache and an empty tier.
            server.reset_caches()
        found["mapped_bytes"]["after_reset"] = memory.samples[-1][1]["server"]
        return found
