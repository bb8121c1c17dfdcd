"""When a tier is late: it has not answered something for longer than is worth waiting.

vLLM asks a tier that does not answer again in every step, and the request waits for as
long as the disk hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from kvpatch.environ import TIER_PATIENCE

_DEFAULT = 10.0


def patience() -> float:
    """Seconds after which a tier without an answer is late.

    Raises:
        ValueError: the variable is not a number of seconds.
    """
    text = TIER_PATIENCE.read() or str(_DEFAULT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f'{TIER_PATIENCE}="{text}" is not a number of seconds; use for example 10')
    return seconds


class Unanswered:
    """Since when each question is without an answer, in the order they were asked.

    Args:
        limit: seconds after which an answer is late.
        clock: seconds on a clock that never goes back.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.clock = clock
        self._since: dict[Hashable, float] = {}

    def asked(self, question: Hashable) -> None:
        """Take note of a question."""
        self._since.pop(question, None)  # so that the oldest stays in front
        self._since[question] = self.clock()

    def answered(self, question: Hashable) -> None:
        """Take note of its answer; one that was never asked is none."""
        self._since.pop(question, None)

    @property
    def late(self) -> bool:
        """Whether the oldest question has waited longer than the limit."""
        # Asked for every block of a prompt, while as many questions may be open.
        while True:
            try:
                since = next(iter(self._since.values()), None)
            except RuntimeError:  # another thread asked or answered meanwhile
                continue
            return since is not None and self.clock() - since > self.limit
