"""Percentiles, ratios of two arms, and the noise of equal arms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.bench import arms


def summary(samples: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return mean, median and 99th percentile, each times ``scale``.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    # The sample below which 99 % lie, not a value between two: there are few of them.
    last = ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)]
    return {
        "mean": round(statistics.fmean(ordered) * scale, 3),
        "p50": round(statistics.median(ordered) * scale, 3),
        "p99": round(last * scale, 3),
    }


@dataclass(frozen=True)
class Pair:
    """One arm against another, repeat by repeat.

    Attributes:
        ratios: of each repeat, the first arm's figure by the second's.
    """

    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)

    @property
    def noise(self) -> float:
        """The largest distance of a ratio from 1, which is the noise of equal arms."""
        return max(abs(ratio - 1) for ratio in self.ratios)

    def __str__(self) -> str:
        return f"{self.median:.3f}x ({min(self.ratios):.3f} to {max(self.ratios):.3f})"


def pair(first: Sequence[float], second: Sequence[float]) -> Pair:
    """Pair two arms' figures, which ran next to each other in each repeat.

    Raises:
        ValueError: the arms have not the same number of repeats, or none, or a figure of
            the second is not positive.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} and {len(second)} repeats cannot be paired")
    if min(second) <= 0:
        raise ValueError("a figure to divide by is not positive")
    return Pair(tuple(a / b for a, b in zip(first, second, strict=True)))


def compared(
    part: dict[str, Any], load: str, first: arms.Arm, second: arms.Arm, figure: str
) -> Pair:
    """Return the ratios of one arm's figure to another's on a load of a part of ``host.json``.

    Args:
        part: of the result.
        load: its name.
        first, second: two arms.
        figure: where it is in a run, with dots.
    """
    runs = part["loads"][load]["runs"]
    return pair(*([_in(run, figure) for run in runs[arm.name]] for arm in (first, second)))


def _in(run: Any, figure: str) -> float:
    for name in figure.split("."):
        run = run[name]
    return float(run)


def noise(part: dict[str, Any], load: str, figure: str) -> float:
    """Return the largest difference of the two equal arms."""
    return compared(part, load, arms.TWIN, arms.KVPATCH, figure).noise
