"""The free memory of every rank's GPU.

kvcached maps a page on all ranks or on none, and reads the free memory of one GPU, that of the
engine's process. If a neighbour fills another one, kvcached counts pages as free that it cannot
map: it evicts no cached block to reuse its page, and the same map fails in every step. What the
engine itself maps is the same on every rank, so that only the difference between the GPUs has to
be asked for, and seldom.
"""

from __future__ import annotations

import time
from typing import Any

from kvpatch import state
from kvpatch.environ import KVCACHED_GPU_UTILIZATION
from kvpatch.logs import log
from kvpatch.patch import argument
from kvpatch.sizes import readable
from kvpatch.upstream import kvcached_api

KEY = "kvpatch_usable"  # in a worker's reply: bytes that kvcached may still map on its GPU
PERIOD = 1.0  # seconds between two questions, and without a map after one that failed


class Ranks:
    """What an engine knows of its ranks' GPUs, kept on kvcached's manager."""

    several: bool | None = None  # pages are mapped on several ranks; None until asked
    fewer: int = 0  # pages that the fullest GPU has less than the one that kvcached reads
    due: float = 0.0  # when the ranks are asked next; ``time.monotonic()``, as is ``hold``
    hold: float = 0.0  # until when no page counts as free, because a map failed
    full: bool = False  # whether another GPU was full at the last answer, and the first was not


def around_send(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Add the free memory of a worker's GPU to its answer whether its tensors exist."""
    message = argument(args, kwargs, 1, "msg")
    if message.get("created"):
        usable = _usable()
        if usable is not None:
            message = {**message, KEY: usable}
    return wrapped(argument(args, kwargs, 0, "sock"), message)


def _usable() -> int | None:
    """Return the bytes that kvcached may still map on this thread's GPU; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        free, total = torch.cuda.mem_get_info()
        share = float(KVCACHED_GPU_UTILIZATION.read() or 0.95)
    except (RuntimeError, ValueError):
        return None
    return max(0, int(free) - int(total * (1 - share)))


def around_available(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> int:
    """Count the pages that every rank can map, where kvcached reads one GPU."""
    here = int(wrapped(*args, **kwargs))
    ranks = _several(instance)
    if ranks is None:
        return here
    now = time.monotonic()
    if now < ranks.hold:
        return 0
    if now >= ranks.due:
        ranks.due = now + PERIOD
        _ask(instance, ranks, here)
    return max(0, here - ranks.fewer)


def around_failed_map(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Map no page for a while after one that failed: cached blocks are evicted meanwhile."""
    ranks = _several(instance)
    if ranks is not None:
        ranks.hold = ranks.due = time.monotonic() + PERIOD
        instance._avail_physical_pages_cache = None  # what was counted before is not true any more
    return wrapped(*args, **kwargs)


def _several(manager: Any) -> Ranks | None:
    ranks = state.of(manager, Ranks)
    if ranks.several is None:
        ranks.several = len(kvcached_api.ranks_of(manager)) > 1
    return ranks if ranks.several else None


def _ask(manager: Any, ranks: Ranks, here: int) -> None:
    """Compare the fullest GPU with the one that kvcached reads, which has ``here`` pages."""
    usable = [reply[KEY] for reply in kvcached_api.ask_ranks(manager) if KEY in reply]
    page = manager.page_size * manager.num_layers * manager.num_kv_buffers
    was_full = ranks.full
    ranks.fewer = max(0, here - min(usable, default=here * page) // page)
    ranks.full = 0 < here <= ranks.fewer
    if ranks.full and not was_full:
        log.warning(
            "kvpatch: the GPU of one rank has no free memory for the KV cache, and that of the "
            "first rank has %s; the pool %s keeps to what it has mapped until there is some on "
            "every GPU",
            readable(here * page),
            manager.ipc_name,
        )
