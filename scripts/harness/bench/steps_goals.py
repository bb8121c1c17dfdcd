"""The goals of giving, sharing and a step's cost, set before anything was changed for them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.bench.engine_steps import AGAIN, ALONE, BEFORE, OURS, PLAIN, STATIC
from harness.bench.reports import word

Result = dict[str, Any]
Row = tuple[str, str, str, str, str]
LENDING = "kvpatch balance --lend '*'"  # the arm of sharing.json that ``balance`` is
BUSY, IDLE = "giving, busy, half to store", "giving, idle, all in the tier"
COST = "us_per_step"


@dataclass(frozen=True)
class Arm:
    """What was measured in one arm; a KeyError is what was not."""

    loads: dict[str, dict[str, list[Result]]]
    name: str

    def longest(self, load: str) -> float:
        """Return the longest step of all runs, in milliseconds; an equal arm is more of them."""
        arms = self.loads[load]
        runs = arms[self.name] + (arms.get(AGAIN, []) if self.name == OURS else [])
        return max(float(one["longest_ms"]) for one in runs)

    def median(self, load: str, figure: str) -> float:
        """Return the median of a figure over the runs."""
        return statistics.median(float(one[figure]) for one in self.loads[load][self.name])

    def over(self, other: str, load: str) -> float:
        """Return what a step costs over what it costs in another arm."""
        return self.median(load, COST) / self.median_of(other, load)

    def median_of(self, other: str, load: str) -> float:
        """Return what a step costs in another arm."""
        return Arm(self.loads, other).median(load, COST)

    def with_kvcached(self, load: str, most: float) -> float:
        """Return ``most`` and what kvcached alone adds to vLLM's step, over one of STATIC."""
        alone, plain, static = (self.median_of(one, load) for one in (ALONE, PLAIN, STATIC))
        return most + (alone - plain) / static

    def of_one(self, load: str) -> float:
        """Return how many steps requests take together over what one takes by itself."""
        return self.median(load, "together") / self.median(load, "alone")

    def of_cap(self, cap: str) -> float:
        """Return what a step costs with a cap on cached tokens over what it costs without one."""
        return self.median(f"churn, cap {cap}", COST) / self.median("churn, cap -1", COST)


# A figure, its goal, the most that meets it, how it is written, and what it is.
Most = float | Callable[[Arm], float]
GOALS: tuple[tuple[str, str, Most, str, Callable[[Arm], float]], ...] = (
    (
        "8 requests, 90 % of 65,536 blocks given: longest step",
        "at most 10 ms",
        10,
        "{:.1f} ms",
        lambda arm: arm.longest(BUSY),
    ),
    (
        "the same: median step over one that gives nothing",
        "at most 2x",
        2,
        "{:.1f}x",
        lambda arm: arm.median(BUSY, "median_ms") / arm.median(BUSY, "normal_ms"),
    ),
    (
        "idle, all in the tier: processor time for a block that is given",
        "at most 2 µs",
        2,
        "{:.1f} µs",
        lambda arm: arm.median(IDLE, "us_per_block"),
    ),
    (
        "load in waves: steps of 300 with a barrier",
        "at most 15",
        15,
        "{:.0f}",
        lambda arm: arm.median("waves", "barriers"),
    ),
    (
        "the same, asynchronous: barriers that wait for a batch",
        "0",
        0,
        "{:.0f}",
        lambda arm: arm.median("waves, asynchronous", "barriers_in_flight"),
    ),
    (
        "load in waves: pages mapped and unmapped",
        "at most 60",
        60,
        "{:.0f}",
        lambda arm: arm.median("waves", "mapped") + arm.median("waves", "unmapped"),
    ),
    (
        "churn: a step over vLLM's with its connector on static memory",
        "at most 1.05x and what kvcached alone adds to vLLM's: {:.2f}x",
        lambda arm: arm.with_kvcached("churn", 1.05),
        "{:.2f}x",
        lambda arm: arm.over(STATIC, "churn"),
    ),
    (
        "churn: a step with a cap of 128,000 cached tokens over one without",
        "at most 1.1x",
        1.1,
        "{:.2f}x",
        lambda arm: arm.of_cap("128,000"),
    ),
    (
        "churn: a step with a cap of 1,000,000 cached tokens over one without",
        "at most 1.1x",
        1.1,
        "{:.2f}x",
        lambda arm: arm.of_cap("1,000,000"),
    ),
    (
        "50 requests that share a prefix that is being loaded in 50 steps: steps over those of one",
        "at most 1.1x",
        1.1,
        "{:.2f}x",
        lambda arm: arm.of_one("shared prefix, slow loads"),
    ),
    (
        "the same, each with a tail of its own in the tier",
        "at most 1.1x",
        1.1,
        "{:.2f}x",
        lambda arm: arm.of_one("shared prefix and own tails, slow loads"),
    ),
)


def rows(found: Result) -> Iterator[Row]:
    """Yield the figure, the goal, what was before and is now, and the verdict, of every goal."""
    loads = {row["load"]: row["arms"] for row in found.get("rows", ())}
    for figure, goal, most, form, of in GOALS:
        told: dict[str, float | None] = {}
        for name in (BEFORE, OURS):
            try:
                told[name] = of(Arm(loads, name))
            except KeyError:
                told[name] = None
        before, now = told[BEFORE], told[OURS]
        if callable(most):
            most = 0.0 if now is None else most(Arm(loads, OURS))
        yield (
            figure,
            goal.format(most),
            "-" if before is None else form.format(before),
            "-" if now is None else written(form, now, most),
            "open" if now is None else word(now <= most),
        )


def written(form: str, number: float, most: float) -> str:
    """Return a figure, with more digits where rounding would hide that it misses its goal."""
    while number > most and form.format(number) == form.format(most):
        form = re.sub(r"\.(\d+)f", lambda digits: f".{int(digits[1]) + 1}f", form)
    return form.format(number)


def sharing_rows(found: Result) -> Iterator[tuple[str, str, str, str]]:
    """Yield the figure, the goal, what is now, and the verdict, of what is simulated on traces."""
    pool, every = found["pool"]["rows"], found["models"]["rows"]
    lending = [one for one in every if one["arm"] == LENDING]
    for what, goal, figure in (
        ("host pool over fixed halves", 1.0, "over_halves"),
        ("host pool over one LRU over all blocks", 0.9, "over_one_lru"),
    ):
        worst = min(pool, key=lambda one: float(one[figure]))
        where = f"{' beside '.join(worst['pair'])}, turns of {worst['turn']} s"
        now = worst[figure]
        yield f"{what}, least: {where}", f"at least {goal:.2f}x", f"{now:.3f}x", word(now >= goal)
    for what, goal, figure in (
        ("eight models, `balance`: tokens/s over static parts", 1.5, "tokens_over_static"),
        ("the same over one LRU over all of them", 0.95, "tokens_over_one_lru"),
    ):
        now = min(one[figure] for one in lending)
        yield what, f"at least {goal:.2f}x", f"{now:.3f}x", word(now >= goal)
    for what, goal, figure in (
        ("their P90 of the first token over static parts", 0.55, "p90_over_static"),
        ("that of the model that fares worst", 1.0, "worst_p90_over_static"),
    ):
        now = max(one[figure] for one in lending)
        yield what, f"at most {goal:.2f}x", f"{now:.3f}x", word(now <= goal)
