"""The coldest pages of an engine, found without a walk over all of its blocks in each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Any

from kvpatch.upstream import kvcached_api
from kvpatch.upstream.kvcached_api import Page

LOOK = 2048  # blocks at a time; about a millisecond


class Coldest:
    """The pages of kvcached's pool that no request uses, the coldest first."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._found: deque[Page] = deque()
        self._look = LOOK

    def forget(self) -> None:
        """Begin anew: what was found was the coldest of its time."""
        self._found.clear()
        self._look = LOOK

    def next(self, taken: Container[int]) -> Page | None:
        """Take the coldest page that is left, but none of blocks that are ``taken``; or None."""
        while True:
            while self._found:
                page = self._found.popleft()
                if kvcached_api.is_unused(self._pool, page):
                    return page
            if not self._find(taken):
                return None

    def _find(self, taken: Container[int]) -> bool:
        """Look at more and more blocks until a page is left among them; return whether one is."""
        while True:
            pages = kvcached_api.unused_pages(self._pool, self._look)
            self._found.extend(page for page in pages if page.blocks[0] not in taken)
            if self._found or self._look >= len(self._pool._evictable_blocks):
                return bool(self._found)
            self._look *= 2
