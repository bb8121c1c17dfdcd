"""Limits that a program in the engine's process sets by revision, on any thread.

kvcached keeps such a limit in the page allocator alone. Once a limit was set in /dev/shm, by kvctl
or by a suspension, every allocation applies that one over any later revision, which is still
called applied. So that there is one limit, the last one that anybody set, a revision is written
there too: on the engine's thread, because kvcached's lock of the pool may be taken on no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpatch import state
from kvpatch.logs import log
from kvpatch.upstream import kvcached_limits


@dataclass
class Published:
    """The last revision that is in /dev/shm too; kept on kvcached's manager."""

    revision: int = -1


def waits(manager: Any) -> bool:
    """Whether a limit was set by revision that is not in /dev/shm yet."""
    return state.of(manager, Published).revision != kvcached_limits.revision(manager)


def publish(manager: Any) -> None:
    """Write a limit that was set by revision to /dev/shm; on the engine's thread."""
    published, revision = state.of(manager, Published), kvcached_limits.revision(manager)
    if published.revision == revision:
        return
    published.revision = revision
    try:
        kvcached_limits.publish_revision(manager)
    except OSError as error:  # the pool is another user's by now, for example
        log.warning("kvpatch: a limit set by revision is not in /dev/shm: %s", error)
