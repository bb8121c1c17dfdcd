"""The timeout of a secondary tier: it is late while a call to it is pending for too long.

vLLM polls an unresponsive tier in every step, and the request waits for as long as the disk
does not respond. A call is pending from its start on a thread of the tier, and again from every
block that it has read or written, or some that it has looked up: a disk with a long queue responds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

from kvpatch.environ import TIER_PATIENCE, seconds

_thread = threading.local()


def patience() -> float:
    """Return the seconds after which a tier that has not responded is late."""
    return seconds(TIER_PATIENCE.read() or TIER_PATIENCE.unset)


class Unanswered:
    """The start times of pending calls to a tier, oldest first; late after ``limit`` seconds."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.clock = clock
        self._since: dict[Hashable, float] = {}

    def asked(self, question: Hashable) -> None:
        """Record the start of a call."""
        self._since.pop(question, None)  # so that the oldest stays first
        self._since[question] = self.clock()

    def answered(self, question: Hashable) -> None:
        """Record the end of a call; ignored if its start was not recorded."""
        self._since.pop(question, None)

    def run(
        self,
        question: Hashable,
        task: Callable[[], None],
        moved: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Run a task of the tier, pending until it returns; ``progressed`` starts it anew.

        ``moved`` is told the bytes of each block that the disk has taken or given.
        """
        self.asked(question)

        def progressed(size: int) -> None:
            self.asked(question)
            moved(size)

        _thread.progressed = progressed
        try:
            task()
        finally:
            _thread.progressed = None
            self.answered(question)

    @property
    def late(self) -> bool:
        """Whether the oldest call is pending for longer than the limit."""
        # Evaluated for every block of a prompt, with as many calls pending.
        while True:
            try:
                since = next(iter(self._since.values()), None)
            except RuntimeError:  # another thread changed the dictionary meanwhile
                continue
            return since is not None and self.clock() - since > self.limit


def progressed(size: int) -> None:
    """Record that the disk has responded to this thread's task with a block; 0 for one it had."""
    told = getattr(_thread, "progressed", None)
    if told is not None:
        told(size)
