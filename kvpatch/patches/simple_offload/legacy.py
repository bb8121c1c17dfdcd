"""SimpleCPUOffloadConnector before vLLM 0.26, in the terms of later releases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpatch.patch import argument
from kvpatch.patches.simple_offload.eviction import EvictionOrder, bind
from kvpatch.patches.simple_offload.lifetime import waits_for_copies
from kvpatch.upstream import connectors

# CU_MEMCPY_SRC_ACCESS_ORDER_STREAM of the CUDA driver: the source is read in stream order.
_IN_STREAM_ORDER = 1


class Link:
    """A block in vLLM's linked list, whose successor is determined on access.

    The connector accesses it once per link, after it has processed the block.
    """

    def __init__(self, block: Any, rest: Iterator[Any]) -> None:
        self._block = block
        self._rest = rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    @property
    def next_free_block(self) -> Link | None:
        """The next block of the walk, or None at its end."""
        block = next(self._rest, None)
        return None if block is None else Link(block, self._rest)


class LinkedOrder(EvictionOrder):
    """The order as a linked list; every walk starts at its head."""

    fake_free_list_tail = None

    @property
    def fake_free_list_head(self) -> Link:
        """The link before the first block."""
        return Link(None, self.iter_blocks_after(None))

    def end_step(self) -> None:
        """Also discard the position where the walk stopped."""
        super().end_step()
        self._scheduler._cursor = None


def around_bind(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Provide kvcached's pool with vLLM's attribute ``blocks``, and with lazy mode's queue."""
    wrapped(*args, **kwargs)
    pool = instance._gpu_block_pool
    pool.blocks = pool.kv_block_pool
    bind(instance, LinkedOrder)


def around_has_requests(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep an engine of 0.19 to 0.23 stepping while blocks wait for a copy."""
    schedulers = (
        getattr(part, "scheduler_manager", None) for part in connectors.parts(instance.connector)
    )
    waits = any(scheduler is not None and waits_for_copies(scheduler) for scheduler in schedulers)
    return bool(wrapped(*args, **kwargs)) or waits


class AlsoUnderWay:
    """A CPU pool's blocks by hash, including those that are still being stored."""

    def __init__(self, stored: Any, under_way: dict[Any, Any]) -> None:
        self._stored = stored
        self._under_way = under_way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def get_one_block(self, key: Any) -> Any:
        """Return a block with this hash, or None."""
        return self._under_way.get(key) or self._stored.get_one_block(key)


def around_eager_stores(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Exclude blocks that earlier steps are still storing, as vLLM does those of its own step."""
    pool = instance.cpu_block_pool
    stored = pool.cached_block_hash_to_block
    under_way = {
        pool.blocks[block_id].block_hash: pool.blocks[block_id]
        for transfer in instance._store_event_to_blocks.values()
        for block_id in transfer.cpu_block_ids
    }
    pool.cached_block_hash_to_block = AlsoUnderWay(stored, under_way)
    try:
        return wrapped(*args, **kwargs)
    finally:
        pool.cached_block_hash_to_block = stored


def ordered_backend(backend: Any) -> Any:
    """Replace ``DmaCopyBackend`` by one whose copies wait for the computation before them."""

    class OrderedCopyBackend(backend):  # type: ignore[misc]
        def init(self, *args: Any, **kwargs: Any) -> None:
            super().init(*args, **kwargs)
            self._store_params.attrs.srcAccessOrder = _IN_STREAM_ORDER

        def launch_copy(
            self, src_blocks: Any, dst_blocks: Any, is_store: bool, *args: Any, **kwargs: Any
        ) -> None:
            _after_computation(self._store_stream if is_store else self._load_stream)
            super().launch_copy(src_blocks, dst_blocks, is_store, *args, **kwargs)

    return OrderedCopyBackend


def around_load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Let a load wait for the step in flight, which may read a window that its blocks left."""
    if not argument(args, kwargs, 2, "is_store"):
        _after_computation(instance._load_stream)
    wrapped(*args, **kwargs)


def _after_computation(stream: Any) -> None:
    """Let a stream wait for the computation so far, before a thread launches the copy."""
    from vllm.v1.simple_kv_offload.worker import torch

    stream.wait_stream(torch.cuda.current_stream())
