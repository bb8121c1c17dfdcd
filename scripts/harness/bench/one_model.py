"""One model on a device of its own: every arm and load, repeat by repeat.

All servers run from the beginning, because a start takes longer than a load. Only one of
them has requests at a time; the others are idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from harness.bench import arms as known
from harness.bench.arms import Arm
from harness.bench.loads import Load
from harness.bench.measure import run
from harness.bench.sizes import Size
from harness.bench.starting import Starter

T = TypeVar("T")


def turns(arms: Sequence[T], repeat: int) -> list[T]:
    """Return the order of a repeat: it begins with another arm, and every other is reversed.

    A machine that gets slower or faster meanwhile then favours no arm.
    """
    at = 2 * (repeat // 2) % len(arms)
    order = [*arms[at:], *arms[:at]]
    return order[::-1] if repeat % 2 else order


def measured(
    arms: Sequence[Arm],
    starter: Starter,
    loads: Mapping[str, Callable[[Size, int], Load]],
    slug: str,
) -> dict[str, Any]:
    """Start every arm, run every load, and return the part of a run with one model.

    Args:
        arms: what is compared.
        starter: starts servers.
        loads: by their names.
        slug: of its servers, which no other part has.
    """
    size, screen = starter.size, starter.screen
    found: dict[str, Any] = {name: {"runs": {arm.name: [] for arm in arms}} for name in loads}
    with ExitStack() as stack:
        servers = {
            arm: starter.start(stack, known.kind(arm, size, size.blocks, f"{slug}{number}"))
            for number, arm in enumerate(arms)
        }
        for repeat in range(size.repeats):
            for name, make in loads.items():
                load, runs = make(size, repeat), found[name]["runs"]
                for arm in turns(arms, repeat):
                    screen.live(f"repeat {repeat + 1}, {name}: {arm.name}")
                    server = servers[arm]
                    runs[arm.name].append(run(load, server, starter.folders[server]))
                    server.reset_caches()  # the next load finds an empty cache and an empty tier
                rates = (
                    f"{arm.name} {runs[arm.name][-1]['total_tokens_per_second']:,.0f}"
                    for arm in arms
                )
                screen.say(
                    f"repeat {repeat + 1} of {size.repeats}, {name}: {', '.join(rates)} tok/s"
                )
    return {"loads": found}
