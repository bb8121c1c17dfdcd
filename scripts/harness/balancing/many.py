"""Many models on the memory of few, of which few are busy at a time."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness.balancing.arms import Arm, Balanced
from harness.balancing.device import Device
from harness.balancing.engine import Engine
from harness.balancing.traces import BLOCK, Conversation

GIB = 1 << 30
MODELS, BUSY = 8, 1.5  # of them on average
DEVICE, TIER = 40 * GIB, 16 * GIB  # the CPU tier of each
PER_TOKEN = 56 << 10
LONGEST = 60_000
USERS = 24  # of each
SPELL = 120.0  # seconds for which a model is busy, on average
NEVER = 86_400.0  # seconds, after the end of every simulation
OFTEN = 6  # times that the sessions are repeated, with other keys: there are too few
SETTING = {
    "models": MODELS,
    "busy": BUSY,
    "device_bytes": DEVICE,
    "tier_bytes": TIER,
    "bytes_per_token": PER_TOKEN,
    "longest": LONGEST,
    "users": USERS,
    "spell_seconds": SPELL,
}


def spells(seed: int, seconds: float) -> list[tuple[float, float]]:
    """Return from when to when a model is busy."""
    drawn, rest = random.Random(seed), SPELL * (MODELS / BUSY - 1)
    now, found = drawn.uniform(0, SPELL + rest), []
    while now < seconds:
        end = now + drawn.expovariate(1 / SPELL)
        found.append((now, end))
        now = end + drawn.expovariate(1 / rest)
    return found


def asks(seed: int, seconds: float) -> Callable[[int, float], float]:
    """Return when a user may ask next."""
    busy = spells(seed, seconds)

    def active(user: int, when: float) -> float:
        return next((max(when, begin) for begin, end in busy if when < end), NEVER)

    return active


def repeated(sessions: Sequence[Conversation], seed: int) -> list[Conversation]:
    """Return sessions in another order, some times, each time with other keys."""
    drawn, found = random.Random(seed), []
    for number in range(1, OFTEN + 1):
        for session in drawn.sample(sessions, len(sessions)):
            found.append(
                [
                    replace(turn, keys=tuple(key + (number << 40) for key in turn.keys))
                    for turn in session
                ]
            )
    return found


def simulate(
    arm: Arm, seconds: float, sessions: Sequence[Conversation], seed: int
) -> dict[str, Any]:
    """Run one arm; return what was measured."""
    block = PER_TOKEN * BLOCK
    names = [f"model{number}" for number in range(MODELS)]
    engines = [Engine(name, block, TIER // block, arm.cached, LONGEST) for name in names]
    limits = arm.make(engines, DEVICE)
    device = Device(engines, limits)
    for number, engine in enumerate(engines):
        own = repeated(sessions, 7 * seed + number)
        device.users(engine, own, USERS, asks(100 * seed + number, seconds))
    device.run(seconds)
    return {
        "tokens_per_second": round(sum(one.measured.tokens for one in engines) / seconds, 1),
        "p90": first_token(engines, seconds),
        "models": {one.name: first_token([one], seconds) for one in engines},
        "moves": limits.moves if isinstance(limits, Balanced) else 0,
    }


def first_token(engines: Sequence[Engine], seconds: float) -> float:
    """Return the 90th percentile of the seconds to the first token.

    Who still waits has waited for so long already.
    """
    found = [first for one in engines for first in one.measured.first]
    found += [
        seconds - one.came
        for engine in engines
        for one in (*engine.queue, *engine.running)
        if one.first is None
    ]
    return round(statistics.quantiles(found, n=10)[8], 3) if len(found) > 1 else 0.0
