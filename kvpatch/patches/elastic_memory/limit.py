"""The limit of an engine's memory, which an operator may change while it runs.

kvcached takes one above what the engine started with as it is, and counts pages as free that
nothing can map: no request is refused, no cached block evicted, and every allocation fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpatch import state
from kvpatch.logs import log
from kvpatch.patch import argument
from kvpatch.sizes import readable
from kvpatch.upstream import kvcached_api


class Told:
    """The last limit that the log named, kept on kvcached's manager; bytes of one layer."""

    limit: int = 0


def around_resize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep a limit, bytes of one layer's K or V, within the memory that the engine started with."""
    wanted = int(argument(args, kwargs, 0, "new_mem_size"))
    if wanted <= instance.mem_size:
        return bool(wrapped(wanted))
    told = state.of(instance, Told)
    if told.limit != wanted:
        told.limit = wanted
        tensors = instance.num_layers * instance.num_kv_buffers
        log.warning(
            "kvpatch: the limit of %s for the pool %s is above the %s that its engine started "
            "with, which stay its limit; restart the engine to give it more",
            readable(wanted * tensors),
            instance.ipc_name,
            readable(instance.mem_size * tensors),
        )
    return bool(wrapped(instance.mem_size))


def looked_at(finish_shrink: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what replaces ``KVCacheManager._maybe_finish_shrink()``.

    While a limit waits kvcached counts the blocks of all pages there, in every free and every step.
    The page allocator refuses the limit as long as it has more pages in use, whatever is in them.
    """

    def finishing(self: Any) -> None:
        if not (self.in_shrink and kvcached_api.is_above_goal(self)):
            finish_shrink(self)

    return finishing
