"""Seconds suspended, and blocks spilled and restored, of an engine that gives memory back.

A block is spilled when its store into the CPU tier begins, and restored when its load from there
does: an engine of vLLM ends where a copy fails.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any

from kvpatch.telemetry.suspended import REASONS

LOOKS = 3  # chunks that are looked at for each that is spilled: with all at once a step took 50 ms


class Counts:
    """The counts of one engine since its start, written on its thread; kept on its ``Spill``."""

    def __init__(self, tier: Any) -> None:
        self.spilled = dict.fromkeys(REASONS, 0)  # blocks by reason, of ``REASONS``
        self.restored = 0  # of them those loaded since, each as often as it was spilled
        # The chunks of those that were not loaded yet; at most twice what the tier has room for.
        # The first of them were looked at, or spilled, before the others.
        self.away: dict[bytes, None] = {}
        self.last: dict[str, int] | None = None  # blocks that the last suspension found and kept
        self._tier = tier
        # The seconds of suspensions that have ended, and when the present one began: one object,
        # because a reader between two assignments would count a suspension twice.
        self._suspended: tuple[float, float | None] = (0.0, None)

    def suspended(self, now: bool) -> None:
        """Record whether the engine is suspended from now on."""
        before, since = self._suspended
        if now != (since is not None):
            at = time.monotonic()
            self._suspended = (before, at) if since is None else (before + at - since, None)

    def stored(self, keys: Collection[bytes], reason: str) -> None:
        """Record that stores of chunks have begun, for one of ``REASONS``."""
        self.spilled[reason] += len(keys) * self._tier.blocks_per_chunk
        if len(self.away) + len(keys) > self._tier.capacity():
            self._drop(list(islice(self.away, LOOKS * len(keys))))
        self.away.update(dict.fromkeys(keys))

    def _drop(self, looked: list[bytes]) -> None:
        """Forget those of chunks that the tier has evicted meanwhile: they are loaded no more."""
        flying = self._tier.awaits(set(looked))
        for key in looked:
            del self.away[key]
            if key in flying or self._tier.holds(key):
                self.away[key] = None

    def loaded(self, keys: Iterable[bytes]) -> None:
        """Record that loads of chunks have begun, spilled ones and others."""
        back = self.away.keys() & set(keys)
        self.restored += len(back) * self._tier.blocks_per_chunk
        for key in back:
            del self.away[key]

    def describe(self) -> dict[str, object]:
        """Return the counts as JSON; seconds up to now if the engine is suspended."""
        before, since = self._suspended
        now = 0.0 if since is None else time.monotonic() - since
        return {
            "seconds": round(before + now, 3),
            "spilled": dict(self.spilled),
            "restored": self.restored,
        }
