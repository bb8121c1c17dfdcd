"""What a secondary tier did with its disk: counted on the threads that read and write there."""

from __future__ import annotations

import threading
from collections import Counter

# What went wrong: a job that could not write or read all of its blocks, a file that does not hold
# what was stored, a look whether blocks have files, a job that was not begun as the disk is late, a
# block for which the tier's size or the disk had no room, a file that was removed to make room
# between the look for it and its load.
ERRORS = ("store", "load", "damaged", "lookup", "late", "full", "gone")
OUTCOMES = ("stored", "loaded", "evicted")


class Disk:
    """The counts of one tier, since its engine started."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()  # by kind
        self.moved_bytes: Counter[str] = Counter()  # by outcome; files are not stored again
        self._lock = threading.Lock()

    def failed(self, kind: str) -> None:
        """Count an error, of ``ERRORS``."""
        with self._lock:
            self.errors[kind] += 1

    def moved(self, outcome: str, size: int) -> None:
        """Count bytes, of ``OUTCOMES``."""
        with self._lock:
            self.moved_bytes[outcome] += size
