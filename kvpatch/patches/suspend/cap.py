"""The bound of the prefix cache while a controller moves the limits of a device's engines.

kvcached keeps 16,000 tokens of finished requests, which is what an idle engine has of a device that
nobody divides. Where ``kvpatch balance`` does, what fits an engine's limit is in nobody's way.
"""

from __future__ import annotations

import time
from typing import Any

from kvpatch.environ import KVCACHED_MAX_CACHED_TOKENS

_NONE = -1  # kvcached's for no bound


class Cap:
    """The bound of an engine.

    Args:
        pool: kvcached's ``ElasticBlockPool``.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._own = pool.max_cached_blocks
        self._until = 0.0  # in seconds of the clock; 0 without a controller

    def lift(self, seconds: float) -> None:
        """Keep what fits the limit for so many seconds, unless the operator set a bound."""
        if not KVCACHED_MAX_CACHED_TOKENS.read():
            self._until = time.monotonic() + seconds
            self._pool.max_cached_blocks = _NONE

    def advance(self) -> None:
        """Set kvcached's bound again once nobody controls the engine; called at every step.

        What is above it goes when the next request ends.
        """
        if self._until and time.monotonic() > self._until:
            self._until = 0.0
            self._pool.max_cached_blocks = self._own
