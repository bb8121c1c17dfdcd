"""Blocks on kvcached's memory, without an engine: its allocator, its views, and marks in them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kvpatch import state
from kvpatch.patches.elastic_memory.regions import find_regions
from kvpatch.patches.fence.fence import Fence, Transfer
from kvpatch.patches.fence.hooks import Fenced, around_release
from kvpatch.upstream import kvcached_api

BLOCK = 16  # tokens


def pool_for(count: int, heads: int, size: int) -> int:
    """Return the blocks of a pool in which ``count`` fit beside what kvcached keeps for itself.

    K and V have pages of 2 MiB each; the first page, and spare ones, are kept.
    """
    page = (2 << 20) // (BLOCK * heads * size * 2)
    return (-(-count // page) + 6) * page


class Pages:
    """A pool of blocks as an engine has one, marked through the views that a model writes by.

    Args:
        layers, heads, size: of the model whose KV these would be.
        blocks: how many there are.
        device: of kvcached: ``cuda:0``, on the host device too.
    """

    def __init__(self, layers: int, heads: int, size: int, blocks: int, device: str) -> None:
        from kvcached.integration.vllm import interfaces

        self._interfaces = interfaces
        self.blocks = blocks
        interfaces.init_kvcached(is_worker=True, device=device)
        caches = interfaces.alloc_kv_cache(
            (blocks, 2, BLOCK, heads, size), BLOCK, torch.bfloat16, device, layers
        )
        self.views = {f"layer{number}": cache for number, cache in enumerate(caches)}
        self.manager = interfaces.get_kv_cache_manager(blocks, BLOCK, heads * size * 2, layers)
        self.regions = find_regions(self.views, [list(self.views)], blocks)

    def close(self) -> None:
        """Free everything."""
        self._interfaces.shutdown_kvcached()

    def take(self, count: int) -> list[int]:
        """Allocate blocks.

        Raises:
            RuntimeError: there are too few.
        """
        blocks = self.manager.alloc(count)
        if blocks is None:
            raise RuntimeError(f"{count} blocks could not be mapped")
        return [int(block) for block in blocks]

    def mark(self, blocks: list[int], marks: list[int]) -> None:
        """Fill each block, in every layer, with its own number."""
        for layer, cache in enumerate(self.views.values()):
            for block, mark in zip(blocks, marks, strict=True):
                cache[block].view(torch.int16).fill_(_number(mark, layer))

    def equal(self, blocks: list[int], marks: list[int]) -> int:
        """Return how many blocks hold exactly their mark, in every layer."""
        good = [True] * len(blocks)
        for layer, cache in enumerate(self.views.values()):
            for at, (block, mark) in enumerate(zip(blocks, marks, strict=True)):
                found = cache[block].view(torch.int16)
                good[at] = good[at] and bool((found == _number(mark, layer)).all())
        return sum(good)

    def fenced(self) -> Fence:
        """Put kvpatch's fence between freed pages and their unmapping, as an engine does."""
        manager = self.manager
        fence = Fence(lambda page: kvcached_api.blocks_of_page(manager, page), workers=1)
        planner = SimpleNamespace(_sliding_window_groups=[])
        connector = type("OffloadingConnector", (), {"connector_scheduler": planner})()
        scheduler = SimpleNamespace(
            connector=connector,
            has_unfinished_requests=lambda: True,
            has_finished_requests=lambda: False,
        )
        manager.defer_physical_release = True
        manager.physical_release_barrier = None
        state.attach(planner, state.attach(manager, Fenced(fence, manager, scheduler)))
        return fence

    def release(self) -> None:
        """Unmap the pages that the fence releases."""
        manager = self.manager
        wrapped = getattr(type(manager).release_retired_pages_through, "__wrapped__", None)
        marker = manager.capture_physical_release_marker()
        if wrapped is None:  # without kvpatch its function is called directly
            around_release(manager.release_retired_pages_through, manager, (marker,), {})
        else:
            manager.release_retired_pages_through(marker)

    @property
    def mapped(self) -> int:
        """Bytes that the pool has mapped."""
        return int(self.manager.get_mapped_memory_size())


def planned(fence: Fence, pages: Pages, job: int, blocks: list[int]) -> None:
    """Plan a transfer in the fence, as the scheduler does when it has built a step."""
    epoch = pages.manager.capture_physical_release_marker()
    fence.plan([(job, Transfer("request", tuple(blocks)))], epoch)


def _number(mark: int, layer: int) -> int:
    return (mark * 31 + layer * 7 + 1) % 32749
