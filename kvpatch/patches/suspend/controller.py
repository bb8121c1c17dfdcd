"""What an engine does while a controller moves the limits of a device's engines, and after it.

kvcached keeps 16,000 tokens of finished requests, which is what an idle engine has of a device that
nobody divides. Where ``kvpatch balance`` does, what fits an engine's limit is in nobody's way. What
a request needs can be lent meanwhile; an engine takes it back by itself when the controller is
silent, because that may have been killed.
"""

from __future__ import annotations

import time
from typing import Any

from kvpatch.environ import KVCACHED_MAX_CACHED_TOKENS

_NONE = -1  # kvcached's for no bound


class Controller:
    """Who moves an engine's limit, as far as the engine hears of it."""

    def __init__(self, pool: Any) -> None:
        self.alone: int | None = None  # bytes of the limit to have without it; None for the same
        self._pool = pool
        self._own = pool.max_cached_blocks
        self._until = 0.0  # in seconds of the clock; 0 without a controller

    def heard(self, seconds: float, alone: int | None) -> None:
        """Take note that for so many seconds what fits the engine's limit is kept, by default."""
        self._until, self.alone = time.monotonic() + seconds, alone
        if not KVCACHED_MAX_CACHED_TOKENS.read():
            self._pool.max_cached_blocks = _NONE

    @property
    def is_gone(self) -> bool:
        """Whether it has not been heard for as long as it said; on any thread."""
        return 0 < self._until < time.monotonic()

    def advance(self) -> int | None:
        """Return the limit to take once it is gone, and set kvcached's bound; at every step."""
        if not self.is_gone:
            return None
        self._until = 0.0
        self._pool.max_cached_blocks = self._own
        alone, self.alone = self.alone, None
        return alone
