"""The goals, set before anything was measured, and the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.bench import arms, two_models
from harness.bench.pairing import Pair, pair

NO_GPU = "not measured: no GPU machine was available"
NOT_RUN = "not measured yet: there is no result file of a full run"
LARGE = 64 << 10


@dataclass(frozen=True)
class Results:
    """The contents of the result files; None for one that is not there."""

    host: dict[str, Any] | None = None
    gpu: dict[str, Any] | None = None


@dataclass(frozen=True)
class Verdict:
    """A goal and its result.

    Attributes:
        goal: in words.
        figure: what was measured, or why nothing was.
        met: whether the figure meets the goal; None when it is not known.
        noise: the difference of equal arms, where two arms are compared.
        unsure: the figure differs from the goal by less than the noise.
    """

    goal: str
    figure: str
    met: bool | None = None
    noise: float | None = None
    unsure: bool = False

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        if self.met is None:
            return "open"
        return ("met" if self.met else "missed") + (", within the noise" if self.unsure else "")


def value(run: dict[str, Any], path: str) -> float:
    """Return a figure of a run by its path, as in ``ttft_ms.mean``."""
    found: Any = run
    for part in path.split("."):
        found = found[part]
    return float(found)


def compared(host: dict[str, Any], load: str, first: str, second: str, path: str) -> Pair | None:
    """Return one arm against another on a load; None when one of them did not run."""
    runs = host.get("one_model", {}).get("loads", {}).get(load, {}).get("runs", {})
    mine, theirs = runs.get(first, []), runs.get(second, [])
    both = min(len(mine), len(theirs))
    if not both:
        return None
    return pair(
        [value(run, path) for run in mine[:both]], [value(run, path) for run in theirs[:both]]
    )


def noise(host: dict[str, Any], load: str, path: str) -> float | None:
    """Return the largest difference of the two equal arms."""
    equal = compared(host, load, arms.TWIN.name, arms.KVPATCH.name, path)
    return None if equal is None else equal.noise


def shown(found: Pair) -> str:
    """Return a ratio in words: the median, with minimum and maximum."""
    low, high = found.spread
    return f"{found.median:.3f}x ({low:.3f} to {high:.3f})"


@dataclass(frozen=True)
class Ratio:
    """A bound of kvpatch's arm against another, in the median over the repeats."""

    goal: str
    load: str
    against: arms.Arm
    path: str
    bound: float
    at_least: bool = False

    def __call__(self, results: Results) -> Verdict:
        """Return the verdict."""
        host = results.host or {}
        found = compared(host, self.load, arms.KVPATCH.name, self.against.name, self.path)
        if found is None:
            return Verdict(self.goal, NOT_RUN)
        floor = noise(host, self.load, self.path)
        met = found.median >= self.bound if self.at_least else found.median <= self.bound
        # A ratio of a tenth has a tenth of the noise that one of 1 has.
        unsure = floor is not None and abs(found.median - self.bound) < floor * self.bound
        return Verdict(self.goal, shown(found), met, floor, unsure)


_RATE, _STATIC = "total_tokens_per_second", "elastic + offloading against static + offloading"
# The overhead of offloading without hits.
_COST = "no reuse, offloading on against off: total tok/s within 1 %"
no_reuse = Ratio(_COST, "no reuse", arms.KVCACHED, _RATE, 0.99, at_least=True)
_FAST = f"returning multi-turn, {_STATIC}: total tok/s at least 1.00x"
conversations_rate = Ratio(_FAST, "conversations", arms.STATIC, _RATE, 1.0, at_least=True)
_SOON = f"returning multi-turn, {_STATIC}: mean TTFT at most 1.00x"
conversations_ttft = Ratio(_SOON, "conversations", arms.STATIC, "ttft_ms.mean", 1.0)
# Loading against recomputing.
_LOADING = "a returning conversation against kvcached alone: median TTFT at most 0.1x"
returning_ttft = Ratio(_LOADING, "conversations", arms.KVCACHED, "returning_ttft_ms.p50", 0.1)


def copies_per_block(results: Results) -> Verdict:
    """Copies per block in kvcached's contiguous layout."""
    goal = "copies for each block in the contiguous layout: 1"
    loads = (results.host or {}).get("one_model", {}).get("loads", {})
    counted = [
        run["copies"]
        for load in loads.values()
        for run in load["runs"].get(arms.KVPATCH.name, [])
        if run["copies"]["blocks"]
    ]
    if not counted:
        return Verdict(goal, NOT_RUN)
    blocks = sum(one["blocks"] for one in counted)
    share = sum(one["copies"] for one in counted) / blocks
    return Verdict(goal, f"{share:.2f} over {blocks:,} blocks", share == 1)


def gpu_copies(results: Results) -> Verdict:
    """The connectors' copies on a GPU against plain copies of pinned memory."""
    goal = f"GPU copies: at least 95 % of pinned copies of blocks of {LARGE >> 10} KiB and more"
    if results.gpu is None:
        return Verdict(goal, NO_GPU)
    large = [row for row in results.gpu["rows"] if row["block_bytes"] >= LARGE]
    if not large:
        return Verdict(goal, "not measured: the result file has no block of that size")
    worst = min(large, key=lambda row: row["share_of_ceiling"])
    share = worst["share_of_ceiling"]
    return Verdict(
        goal,
        f"{share:.1%} at worst ({worst['connector']}, {worst['direction']}, "
        f"{worst['block_bytes'] >> 10} KiB)",
        share >= 0.95,
    )


@dataclass(frozen=True)
class Share:
    """A least share in every cycle of two models."""

    goal: str
    name: str
    bound: float

    def __call__(self, results: Results) -> Verdict:
        """Return the verdict."""
        every = (results.host or {}).get("two_models", {}).get("cycles", {})
        cycles = every.get(two_models.DECIDING[-1].name)
        if not cycles:
            return Verdict(self.goal, NOT_RUN)
        # The worst cycle counts: a neighbour that did not fit once did not fit.
        worst = min(cycle[self.name] for cycle in cycles)
        figure = f"{worst:.1%} in the worst of {len(cycles)} cycles"
        return Verdict(self.goal, figure, worst >= self.bound)


_TURN = "two models in turn: at least"
# Memory that an idle model frees for its neighbour.
_FREED = f"{_TURN} 90 % of what the idle model used is the neighbour's at its peak"
given = Share(_FREED, "given_share", 0.90)
# Prefixes that hit when the idle model's conversations return.
served = Share(f"{_TURN} 95 % of the returning prefixes served", "served_share", 0.95)

GOALS: tuple[Callable[[Results], Verdict], ...] = (
    no_reuse,
    conversations_rate,
    conversations_ttft,
    returning_ttft,
    copies_per_block,
    gpu_copies,
    given,
    served,
)


def verdicts(results: Results) -> list[Verdict]:
    """Return the verdict of every goal, in their order."""
    return [goal(results) for goal in GOALS]
