"""How long an engine of a test may take to do nothing before it is called stuck."""

import itertools
import time
from collections.abc import Iterator

PATIENCE = 20.0  # seconds


def steps(least: int) -> Iterator[int]:
    """Count steps: so many, and more of them until ``PATIENCE`` is over too.

    A step without a request to compute takes less than a millisecond, and a loop of them keeps
    Python's lock from the threads that copy. Thousands of steps can pass while one request waits
    for its load, so that a number of them alone would be a measure of the machine.
    """
    end = time.monotonic() + PATIENCE
    for count in itertools.count():
        if count >= least and time.monotonic() >= end:
            return
        yield count
