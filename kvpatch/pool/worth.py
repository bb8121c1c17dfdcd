"""What an engine's extents are worth beside those of others: their age, and how much is found.

By age alone, who stores much and finds little evicts what others would find. So an age is divided
by the square root of what is found for each chunk that is stored, and an engine with no more than
an equal part of the pool counts for younger. Chosen by simulation: ``scripts/bench sharing``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# Seconds after which what was stored and found counts half.
MEMORY = 600.0
# The least that is found for each chunk that is stored, as far as ages go.
LEAST = 0.05
# Of an engine that has an equal part of the pool, or less, this part of an age counts.
EQUAL = 0.4


class Reuse:
    """How many chunks were found for each that was stored; the older, the less they count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self._stored = self._found = 0.0

    def stored(self, chunks: int) -> None:
        """Note that chunks were handed out."""
        self._forget()
        self._stored += chunks

    def found(self, chunks: int) -> None:
        """Note that what chunks hold was found, and is loaded."""
        self._forget()
        self._found += chunks

    @property
    def rate(self) -> float:
        """Chunks found for each that was stored, at least ``LEAST``; 1 until much was stored."""
        self._forget()
        return LEAST + (1 - LEAST + self._found) / (1 + self._stored)

    def _forget(self) -> None:
        now = self._clock()
        kept = 0.5 ** ((now - self._at) / MEMORY)
        self._at = now
        self._stored *= kept
        self._found *= kept


def age(seconds: float, rate: float, has: int, part: float) -> float:
    """Return how old extents count, in seconds, of who ``has`` bytes, beside an equal ``part``."""
    return seconds / math.sqrt(rate) * (EQUAL if has <= part else 1.0)
