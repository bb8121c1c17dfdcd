"""How many blocks kvcached's manager has, without asking its allocator for every request.

vLLM asks before each allocation of each request: 86 times in a step of 64 requests. What the page
allocator answers to that changes when a page is mapped or unmapped, or a limit applied: then the
manager drops what it has read of the device's free memory, which it keeps for a tenth of a second
at most. Pages are counted whenever that is read anew, and not in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kvpatch import state


class Unmapped(NamedTuple):
    """The blocks of pages that could be mapped; kept on kvcached's manager."""

    blocks: int  # of those pages
    read_at: float  # when the device's free memory was read of which they are, as kvcached has it
    until: float  # when kvcached would read it anew


def remembered(available_size: Callable[[Any], int]) -> Callable[[Any], int]:
    """Return what replaces ``KVCacheManager.available_size()``."""

    def remembering(self: Any) -> int:
        known = state.find(self, Unmapped)
        if (
            known is not None
            and not self.in_shrink  # no page is mapped then
            and self._avail_physical_pages_cache is not None
            and self._avail_physical_pages_ts == known.read_at
            and time.monotonic() < known.until
        ):
            # Allocated and freed by the thread that asks.
            return int(self.num_avail_blocks + len(self.reserved_blocks) + known.blocks)
        from kvcached.kv_cache_manager import _AVAIL_PHYSICAL_PAGES_TTL_S

        with self._lock:
            size = int(available_size(self))
            there = self.num_avail_blocks + len(self.reserved_blocks)
            if not self.in_shrink:
                read_at = self._avail_physical_pages_ts
                until = read_at + _AVAIL_PHYSICAL_PAGES_TTL_S
                state.attach(self, Unmapped(size - there, read_at, until))
            return size

    return remembering
