"""``vllm serve`` for tests over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from harness.serve import Server

TRIES = 20  # of requests that may end before anybody has looked, on a busy machine


def eventually(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Poll ``condition`` until it holds; stats arrive after the answer they belong to."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def watched(
    model: Path, arguments: Mapping[str, Any], environment: Mapping[str, str], folder: Path
) -> Server:
    """Return a server with ``TransferProbe`` in its workers, after which nobody clears up."""
    probe = {"worker_extension_cls": "harness.engines.probe.TransferProbe"}
    return Server(model, {**arguments, **probe}, environment, folder, sweep=False)


def begin_and_see(begin: Callable[[], Future[Any]], running: Callable[[], bool]) -> Future[Any]:
    """Begin a request and see it run; once more if it ended before anybody had looked.

    Raises:
        AssertionError: none was seen.
    """
    for _ in range(TRIES):
        request = begin()
        while not request.done():
            if running():
                return request
    raise AssertionError(f"{TRIES} requests ended before anybody saw them run")
