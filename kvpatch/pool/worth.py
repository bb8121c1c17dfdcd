"""What an engine's extents are worth beside those of others: their age, and how much is found.

One order by age over all engines is wrong where one of them stores much and finds little: it
evicts what another one would find. So an age is divided by the square root of how many chunks are
found for each that is stored, and an engine that has no more than an equal part of the pool counts
for younger. The figures were chosen by simulation, see ``scripts/bench sharing``.
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
    """How many chunks were found for each that was stored; the older, the less they count.

    Nothing here is safe for threads; the caller has a lock.

    Args:
        clock: seconds.
    """

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
    """Return how old extents count among those of other engines, in seconds.

    Args:
        seconds: since they were used.
        rate: chunks that their engine finds for each that it stores.
        has: bytes that it has committed.
        part: bytes of an equal part of the pool.
    """
    return seconds / math.sqrt(rate) * (EQUAL if has <= part else 1.0)
