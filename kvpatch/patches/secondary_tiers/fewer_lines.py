"""Fewer lines in the log: a disk that fails does so in every job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_APART = 60.0  # seconds between two lines with one text


class FewerLines(logging.Filter):
    """Lets a line of a template pass once a minute, and counts those in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._passed: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    @classmethod
    def of(cls, logger: logging.Logger) -> None:
        """Filter ``logger``, once."""
        if not any(isinstance(known, cls) for known in logger.filters):
            logger.addFilter(cls())

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is written; it then says how many were not."""
        text, now = str(record.msg), self._clock()
        if now - self._passed.get(text, -_APART) < _APART:
            self._left_out[text] = self._left_out.get(text, 0) + 1
            return False
        self._passed[text] = now
        left_out = self._left_out.pop(text, 0)
        if left_out:
            record.msg = f"{record.getMessage()} (and {left_out} more since the last such line)"
            record.args = ()
        return True
