"""The gauges of an API server while no step is made: they follow its engines' status pages.

An engine sends its stats with the outputs of a step. Its memory changes without one as well:
kvcached reserves pages on a thread of its own, from the start on, a limit is lowered, and another
engine of a host pool takes memory.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from typing import Any

from kvpatch.logs import log
from kvpatch.telemetry import reader
from kvpatch.telemetry.prometheus import Metrics
from kvpatch.telemetry.series import gauges

INTERVAL = 1.0  # seconds between two looks at the pages; those of other servers are read once


def follow(metrics: Metrics) -> None:
    """Show what the pages say, now and as long as there is somebody to show it to."""
    _try_to_look(metrics)
    # Weak, as the series of a server that its program deletes would stay with the thread.
    followed = (weakref.ref(metrics),)
    threading.Thread(target=_run, args=followed, name="kvpatch-gauges", daemon=True).start()


def _run(followed: weakref.ref[Metrics]) -> None:
    while True:
        time.sleep(INTERVAL)
        metrics = followed()
        if metrics is None or metrics.fuse.off:
            return
        _try_to_look(metrics)
        del metrics


def _try_to_look(metrics: Metrics) -> None:
    try:
        look(metrics)
    except Exception as error:  # the next message has them again
        log.debug("kvpatch: the gauges were not brought up to date: %r", error)


def look(metrics: Metrics) -> None:
    """Show what the status pages of a server's engines say, where that is news."""
    servers = (os.getpid(), os.getppid())
    pages = [found.content for found in reader.engines_of(servers, metrics.others)]
    engines = [number_of(content, metrics) for content in pages]
    known = Counter(engines)
    # The pages and messages have the monotonic clock, by which the later one is shown: the other
    # clock may step back, and is for what is shown as a time.
    offset = time.time() - time.monotonic()
    for content, engine in zip(pages, engines, strict=True):
        if engine is not None and known[engine] == 1:
            written = content["written"]
            metrics.show(engine, gauges(content["engine"], offset + written), written)


def number_of(content: dict[str, Any], metrics: Metrics) -> int | None:
    """Return the engine of a page, by its server's numbers, or None; of old pages, the only one."""
    engine = content["engine"].get("index")
    if engine is None and len(metrics.engines) == 1:
        (engine,) = metrics.engines
    return engine if engine in metrics.engines else None
