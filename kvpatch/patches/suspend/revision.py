"""Limits that a program in the engine's process sets by revision, on any thread.

kvcached keeps such a limit in the page allocator alone. Once a limit was set in /dev/shm, by kvctl
or by a suspension, every allocation applies that one over any later revision, which is still
called applied. So that there is one limit, the last one that anybody set, a revision is written
there too: on the engine's thread, because kvcached's lock of the pool may be taken on no other.
That may be a quarter of a second later: a limit that came into /dev/shm meanwhile is the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpatch import state
from kvpatch.logs import log
from kvpatch.sizes import readable
from kvpatch.upstream import kvcached_api, kvcached_limits


@dataclass
class Published:
    """What is known of /dev/shm and of revisions; kept on kvcached's manager.

    Attributes:
        revision: the last one that is in /dev/shm too, or has given way to a later limit there.
        over: the last limit that was set elsewhere, in bytes of the K or V of one layer, and what
            /dev/shm said then; None if nobody takes note. A revision that is not that limit is the
            one that was read in /dev/shm.
    """

    revision: int = -1
    over: tuple[int, int] | None = None


def note(manager: Any, size: int) -> None:
    """Take note of /dev/shm before a limit is set that was not read there; on any thread."""
    state.of(manager, Published).over = (size, kvcached_api.limit_in_pool(manager))


def waits(manager: Any) -> bool:
    """Whether a limit was set by revision that is not in /dev/shm yet."""
    return state.of(manager, Published).revision != kvcached_limits.revision(manager)


def publish(manager: Any) -> None:
    """Write a limit that was set by revision to /dev/shm; on the engine's thread."""
    published, revision = state.of(manager, Published), kvcached_limits.revision(manager)
    if published.revision == revision:
        return
    published.revision = revision
    wanted = kvcached_limits.of_revision(manager)
    size, over = published.over or (wanted, kvcached_api.limit_in_pool(manager))
    if size != wanted:
        over = wanted * manager.num_layers * manager.num_kv_buffers
    try:
        if later := kvcached_limits.publish_revision(manager, over):
            log.warning(
                "kvpatch: the limit of revision %d gives way to %s, set in /dev/shm after it",
                revision,
                readable(later),
            )
    except OSError as error:  # the pool is another user's by now, for example
        log.warning("kvpatch: a limit set by revision is not in /dev/shm: %s", error)
