"""How much of a step an engine may spend on giving memory back."""

from __future__ import annotations

import time

LONGEST = 0.002  # seconds of a step, or
PART = 0.1  # of a step that takes longer
AT_REST = 0.005  # seconds in which a request that arrives waits
STORE = 32e-6  # seconds that the store of a block takes the engine's thread, until it has completed
LEAST = 8  # blocks that are stored in a step
OWED = 0.1  # seconds at most: a process that was stopped meanwhile does not owe that time


class Share:
    """The time for one step; requests wait no longer than their step takes by itself.

    A page takes longer than the share of a short step: it is paid for in the steps after it.
    """

    def __init__(self) -> None:
        self.stores = LEAST  # the most blocks that the next step stores
        self._ended = time.perf_counter()
        self._credit = 0.0  # seconds for pages, or what pages have taken too long
        self._since: float | None = None  # when the first page was taken up

    def begin(self, runs: bool) -> None:
        """Begin a step's share; if requests run, the step takes its time for them."""
        # What the last share has added to the step is in it.
        step = (time.perf_counter() - self._ended) / 2
        share = min(step, max(LONGEST, min(step * PART, AT_REST))) if runs else AT_REST
        self.stores = max(LEAST, int(share / 2 / STORE))
        owed = max(min(self._credit, 0.0), -OWED)
        self._credit = owed + share / 2 if runs else share

    @property
    def left(self) -> bool:
        """Whether there is time left for a page."""
        now = time.perf_counter()
        if self._since is None:
            self._since = now
        return now - self._since < self._credit

    def end(self) -> None:
        """End it, or a step in which nothing is given back."""
        self._ended = time.perf_counter()
        if self._since is not None:
            self._credit -= self._ended - self._since
            self._since = None
