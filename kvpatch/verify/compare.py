"""Answers against plain vLLM's: tokens, and how far log-probabilities are apart.

After the first token that differs two answers continue different texts, and are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpatch.verify.api import Answer

# Log-probabilities that kernels compute in another order are apart; below this nobody asks why.
FLOOR = 5e-3
# How much farther from plain vLLM than that is from itself.
FACTOR = 4.0


@dataclass(frozen=True)
class Difference:
    """One answer against another to the same prompt."""

    name: str  # of the prompt
    apart: float  # of log-probabilities of equal tokens, at most
    at: int = 0  # the first token that differs, from 1; 0 if none does
    gap: float = 0.0  # how much less likely the other one's is there, or infinite

    @property
    def most(self) -> float:
        """The larger of ``apart`` and ``gap``."""
        return max(self.apart, self.gap)

    def __str__(self) -> str:
        if self.at:
            return f"{self.name}: token {self.at} differs, and is less likely by {self.gap:.3g}"
        return f"{self.name}: log-probabilities are {self.apart:.3g} apart"


def difference(expected: Answer, got: Answer) -> Difference:
    """Compare one answer with the one that is expected."""
    apart = 0.0
    pairs = zip(expected.tokens, got.tokens, strict=True)
    for position, (right, token) in enumerate(pairs):
        likely = expected.top[position]
        if token != right:
            gap = likely[right] - likely.get(token, -math.inf)
            return Difference(expected.name, apart, position + 1, max(0.0, gap))
        apart = max(apart, abs(likely[right] - got.top[position][token]))
    return Difference(expected.name, apart)


def differences(expected: Iterable[Answer], got: Iterable[Answer]) -> list[Difference]:
    """Compare every answer with the expected one of its name."""
    right = {answer.name: answer for answer in expected}
    return [difference(right[answer.name], answer) for answer in got]


def noise(of_itself: Sequence[Difference]) -> float:
    """Return the most that plain vLLM differs from itself."""
    # A token that is not among the likely ones says nothing about how far.
    return max((one.most for one in of_itself if math.isfinite(one.most)), default=0.0)


def allowed(of_itself: Sequence[Difference]) -> float:
    """Return how far an answer may be from plain vLLM's."""
    return max(FLOOR, FACTOR * noise(of_itself))
