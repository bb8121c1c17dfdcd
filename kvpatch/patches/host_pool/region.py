"""The workers' side: the tier's file is sparse, and its extents are registered one by one.

vLLM's ``SharedOffloadRegion`` maps the file, as it does without a pool. It writes to none of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.patches.host_pool import presence
from kvpatch.pool import ledger
from kvpatch.pool.ranks import Rank
from kvpatch.upstream.vllm_api import region_path


class Slice:
    """A range of a region, with what vLLM's functions for pinning a region read of one."""

    def __init__(self, region: Any, offset: int, size: int) -> None:
        self.rank = region.rank
        self.page_size = region.page_size
        self.total_size_bytes = self._row_stride = self.cpu_page_size = size
        self.is_pinned = False
        self.pinned_addresses: list[int] = []
        self._address: int = region._base.data_ptr() + offset
        self._base: Any = self
        # What its ``cleanup`` looks for beside.
        self._views: Any = None
        self.mmap_obj = self.fd = None
        self._creator = False

    def data_ptr(self) -> int:
        """Return where it begins, as a tensor does."""
        return self._address


class Shared:
    """What a worker has of its engine's tier; kept on the ``SharedOffloadRegion``."""

    def __init__(self, region: Any, record: Any) -> None:
        self.pin: Callable[[Any], None] | None = None  # vLLM's, of a region; None if not pinned
        self._region = region
        self._held = ledger.hold(record)
        self._slices: dict[int, Slice] = {}
        try:
            self._rank = Rank(ledger.socket_of(record), self._register)
        except BaseException:
            os.close(self._held)
            raise

    def close(self) -> None:
        """Deregister what is registered, and let the engine's memory go."""
        self._rank.close()
        os.close(self._held)

    def _register(self, wanted: bool, offset: int, size: int) -> bool:
        if self.pin is None:
            return True
        if not wanted:
            type(self._region).cleanup(self._slices.pop(offset))
            return True
        one = Slice(self._region, offset, size)
        self.pin(one)
        if one.is_pinned:
            self._slices[offset] = one
        return one.is_pinned


def around_region(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Map the file that the engine has made, as large as the tier and empty.

    Wraps ``SharedOffloadRegion.__init__(engine_id, num_chunks, rank, kv_bytes_per_chunk, ...)``,
    whose arguments are called blocks up to 0.29. It joins a file that is there.
    """
    engine_id = argument(args, kwargs, 0, "engine_id")
    record = ledger.record_of(presence.home(), engine_id)
    chunks = _either(args, kwargs, 1, "num_chunks", "num_blocks")
    row = _either(args, kwargs, 3, "kv_bytes_per_chunk", "kv_bytes_per_block")
    file = os.open(region_path(engine_id), os.O_RDWR | os.O_NOFOLLOW)
    try:
        os.ftruncate(file, chunks * row)  # every worker does, to the same size
    finally:
        os.close(file)
    # From 0.33 on vLLM may have several files beneath one mapping, to write them faster.
    wrapped(*args, **{name: 1 if name == "num_segments" else kwargs[name] for name in kwargs})
    # The scheduler's, from which disks read and into which they write, has no rank: it registers
    # nothing, and its process is the engine's.
    if instance.rank is not None:
        state.attach(instance, Shared(instance, record))


def around_populate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Write nothing. Wraps ``_get_populate_write_fn``, which returns what writes a range."""
    return _nothing


def _nothing(mapping: Any, offset: int, length: int) -> None:
    """Leave a range as it is."""


def around_pin(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register extents when they are committed. Wraps ``pin_mmap_region(region)``."""
    region = argument(args, kwargs, 0, "region")
    shared = state.find(region, Shared)
    if shared is None:
        wrapped(*args, **kwargs)
        return
    shared.pin = wrapped
    # Its chunks are registered before they are handed out, and the copies are chosen by this.
    region.is_pinned = True


def around_cleanup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Deregister the extents. Wraps ``SharedOffloadRegion.cleanup``."""
    shared = state.find(instance, Shared)
    if shared is not None:
        state.drop(instance, Shared)
        shared.close()
        instance.is_pinned = False
    wrapped(*args, **kwargs)


def _either(args: Any, kwargs: Any, position: int, *names: str) -> int:
    for name in names:
        if name in kwargs:
            return int(kwargs[name])
    return int(args[position])
