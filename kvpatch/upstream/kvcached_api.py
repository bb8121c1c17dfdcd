"""The access to kvcached's internals: its memory layout, its tensors, its page manager.

What is beside the limit in its pool is in ``kvcached_limits``; nobody else reads private names.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch.environ import KVCACHED_CONTIGUOUS, VLLM_KV_CACHE_LAYOUT
from kvpatch.versions import Facts

# vLLM's names of the KV cache layouts that kvcached's memory can have, from vLLM 0.29 on, by
# whether all layers of a block are contiguous. The letters are layers, blocks, heads, tokens (N)
# and channels in memory order. NHD and HND are vLLM's older names of two of them.
LAYOUTS = {
    True: ("BLNHC", "BLHNC"),
    False: ("LBNHC", "LBHNC", "NHD", "HND"),
}

_HAVE_THE_NAME = ("kvcached.kv_cache_manager", "kvcached.mem_info_tracker")

# The storages of the KV caches that kvcached allocated last in this process.
_storages: set[int] = set()


def name() -> str:
    """Return the name of this process's engine: of its pool, and its workers' sockets."""
    from kvcached import utils

    return str(utils.DEFAULT_IPC_NAME)


def rename(name: str) -> None:
    """Give this process's engine another name before it has memory; kvcached's modules copy it."""
    from kvcached import utils

    utils.DEFAULT_IPC_NAME = name
    copies: list[Any] = [sys.modules[one] for one in _HAVE_THE_NAME if one in sys.modules]
    for module in copies:
        module.DEFAULT_IPC_NAME = name
    sockets: Any = sys.modules.get("kvcached.tp_ipc_util")
    if sockets is not None:
        sockets.SOCKET_DIR = utils.get_tp_socket_dir(name)


def contiguous(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a block's layers are contiguous; on ROCm kvcached's default is false."""
    value = environment.get(KVCACHED_CONTIGUOUS.name)
    if value is not None:
        return value.lower() == "true"
    from kvcached import utils

    return bool(utils.CONTIGUOUS_LAYOUT)


def conflicting_layout(facts: Facts) -> str:
    """Return the layout requested of vLLM if kvcached does not support it, else an empty string."""
    requested = facts.environment.get(VLLM_KV_CACHE_LAYOUT.name, "")
    return "" if not requested or requested in LAYOUTS[facts.contiguous] else requested


def describe_layout(vllm_config: Any) -> str:
    """Return the KV layout in the words of the status line; empty before vLLM 0.29."""
    resolved = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    if resolved is None:
        return ""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    preferred = get_kv_connector_cache_layout(vllm_config)
    if preferred in (None, resolved):
        return f"KV layout {resolved}"
    return f"KV layout {resolved} (the connector prefers {preferred})"


def block_view(cache: Any) -> Any:
    """Return kvcached's block view of one layer's KV cache, or None.

    A uint8 tensor of shape ``[blocks, bytes]``, or ``[blocks, 2, bytes]`` if K and
    V are separate. Source: ``_set_block_copy_view`` in kvcached's interfaces.
    """
    first = cache[0] if isinstance(cache, list | tuple) else cache
    return getattr(first, "_kvcached_block_copy_view", None)


def mark(tensor: Any, view: Any) -> None:
    """Let ``block_view`` return ``view`` for a tensor that stands for a layer's KV cache."""
    tensor._kvcached_block_copy_view = view


def remember_storages(kv_caches: Iterable[Any]) -> None:
    """Record the storages of the KV caches that kvcached has just allocated."""
    _storages.clear()
    _storages.update(map(_storage, kv_caches))


def on_kvcached(cache: Any) -> bool:
    """Return whether a KV cache is in the memory that kvcached allocated last (vLLM >= 0.29)."""
    return _storage(cache) in _storages


def _storage(cache: Any) -> int:
    first = cache[0] if isinstance(cache, list | tuple) else cache
    return int(first.untyped_storage().data_ptr())


def pool_of(engine: Any) -> Any:
    """Return the block pool of an ``EngineCore``: kvcached's or, if bypassed, vLLM's own."""
    return engine.scheduler.kv_cache_manager.block_pool


def has_null_block(pool: Any, seconds: float) -> bool:
    """Wait for kvcached's thread to reserve block 0; return whether it has, or still tries to."""
    manager = pool.kv_cache_manager
    return not manager._post_init_done.wait(seconds) or manager.null_block == [0]


def manager_of(engine: Any) -> Any:
    """Return kvcached's page manager of an ``EngineCore``; None with vLLM's own pool."""
    return getattr(pool_of(engine), "kv_cache_manager", None)


def ranks_of(manager: Any) -> list[tuple[int, int]]:
    """Return the ranks on which a page manager maps every page, as (pipeline rank, rank)."""
    from kvcached import tp_ipc_util

    stages = tp_ipc_util._target_pp_ranks(manager.pp_rank)
    return [(stage, rank) for stage in stages for rank in range(manager.world_size)]


def ask_ranks(manager: Any) -> list[dict[str, Any]]:
    """Return what workers answer to whether their tensors exist, but for errors and silence."""
    from kvcached import tp_ipc_util

    message = {"cmd": "kv_tensors_created", "group_id": manager.group_id}

    async def ask() -> list[Any]:
        send = tp_ipc_util._send_and_receive_message
        asked = (send(rank, message, stage) for stage, rank in ranks_of(manager))
        return await asyncio.gather(*asked, return_exceptions=True)

    return [
        reply
        for reply in asyncio.run(ask())
        if isinstance(reply, dict) and reply.get("status") == "success"
    ]


def unmap_at_once(manager: Any) -> None:
    """Let a page manager unmap without waiting for the device, whose caller has waited.

    With asynchronous scheduling and its one worker in this process, kvcached waits for the whole
    device in every unmap, and so for every copy in flight (``unmap_pages`` in
    page_allocator.cpp). It does not if it has somebody else unmap.
    """
    from kvcached import vmm_ops
    from kvcached.integration.vllm.interfaces import should_use_worker_ipc

    if manager.world_size > 1 or should_use_worker_ipc():
        return  # the workers unmap
    group = manager.group_id

    def unmap(world_size: int, offsets: list[int]) -> None:
        if not vmm_ops.unmap_from_kv_tensors(offsets, group_id=group):
            raise RuntimeError("kvcached could not unmap pages")

    manager.page_allocator.set_broadcast_unmap_callback(unmap)
    manager.page_allocator.set_use_worker_ipc(True)


def blocks_of_page(manager: Any, page: int) -> tuple[int, int]:
    """Return the block ids ``[start, end)`` of a page."""
    from kvcached.kv_cache_manager import InternalPage

    start, end = InternalPage.get_block_range(page, manager.page_size, manager.block_mem_size)
    return int(start), int(end)


class Blocks(NamedTuple):
    """The blocks of a KV cache config, as kvcached has them in its pages."""

    number: int  # how many vLLM has, block 0 among them
    size: int  # bytes of one in each tensor
    tensors: int  # of one device; as many as pools, twice if K and V are apart

    @property
    def usable(self) -> int:
        """How many are in a page, which is mapped whole or not at all; block 0 among them."""
        return sum(itertools.islice(self._of_pages(), self.number * self.size // _page_size()))

    def for_use(self, usable: int) -> int:
        """Return how many there must be for so many to be usable."""
        pages = 0
        for there in self._of_pages():
            if usable <= 0:
                break
            usable -= there
            pages += 1
        return -(-pages * _page_size() // self.size)

    def bytes_of(self, number: int) -> int:
        """Return the bytes of so many on one device."""
        return number * self.size * self.tensors

    def fit(self, device: int) -> bool:
        """Whether kvcached's addresses for a device of so many bytes have room for all of them."""
        of_tensor = device // self.tensors // _page_size() * _page_size()
        return self.number * self.size <= of_tensor

    def _of_pages(self) -> Iterator[int]:
        """Iterate over the blocks that are in one page each: not those that cross its end."""
        from kvcached.kv_cache_manager import InternalPage

        for page in itertools.count():
            start, end = InternalPage.get_block_range(page, _page_size(), self.size)
            yield int(end - start)


def _page_size() -> int:
    from kvcached.utils import PAGE_SIZE

    return int(PAGE_SIZE)


def blocks_of(config: Any) -> Blocks:
    """Return a ``KVCacheConfig``'s blocks from 0.29 on; KVCachedConfigError if there are none."""
    from kvcached.integration.vllm.model_runner_v2 import cache_geometry

    found = cache_geometry(config)
    return Blocks(config.num_blocks, int(found.page_bytes), int(found.num_pools))


def older_blocks_of(config: Any) -> Blocks | None:
    """Return a ``KVCacheConfig``'s blocks before 0.29; None where kvcached cannot have them."""
    from kvcached.integration.vllm import patches
    from kvcached.kv_geometry import check_page_geometry

    group = patches._get_first_attention_group(config)
    if group is None:
        return None
    tokens = group.kv_cache_spec.block_size
    kind = patches._infer_attention_type(config)
    cell, buffers = patches._get_kv_cache_params(group.kv_cache_spec, tokens, attention_type=kind)
    if check_page_geometry(tokens * cell, _page_size()) is not None:
        return None
    return Blocks(config.num_blocks, tokens * cell, buffers * patches._get_group_size(config))


def device_size(device: Any) -> int:
    """Return the bytes of a worker's device, of which kvcached has as many addresses."""
    from kvcached.integration.vllm import interfaces

    return int(interfaces.torch.cuda.get_device_properties(device).total_memory)


def device_memory() -> dict[str, Any] | None:
    """Return the free and all bytes of this process's device, and its name; None without one.

    A process whose workers have the device has none, and making it use one would take memory.
    """
    from kvcached.integration.vllm import interfaces

    cuda = interfaces.torch.cuda
    if not cuda.is_initialized():
        return None
    free, total = cuda.mem_get_info()
    return {"device": str(cuda.get_device_name()), "free": int(free), "total": int(total)}


# The limit of an engine. Its pool in /dev/shm has it, where kvctl and controllers set it; a thread
# of kvcached reads it there ten times a second, and the next allocation applies it. All sizes are
# bytes of the device, all layers together.


def page_bytes(manager: Any) -> int:
    """Return the bytes of a page, all layers together."""
    return int(manager.page_size * manager.num_layers * manager.num_kv_buffers)


def most(manager: Any) -> int:
    """Return the bytes that an engine started with, which is the most that it can map."""
    return int(manager.mem_size * manager.num_layers * manager.num_kv_buffers)


def mapped(manager: Any) -> int:
    """Return the bytes that an engine has mapped, those included that it mapped ahead of use."""
    pages = manager.page_allocator.get_page_state()
    return int(pages["inuse_pages"] + pages["reserved_pages"]) * page_bytes(manager)


def free(manager: Any) -> int:
    """Return the bytes that nobody has mapped, of the fullest of an engine's devices.

    On the engine's thread: CUDA answers for the device of the thread that asks.
    """
    manager._avail_physical_pages_cache = None  # of a tenth of a second ago: others map meanwhile
    return int(manager._get_cached_avail_physical_pages()) * page_bytes(manager)


def free_pages(manager: Any) -> int:
    """Return the pages that nobody has mapped, as of the last tenth of a second; as ``free``."""
    return int(manager._get_cached_avail_physical_pages())


def limit(manager: Any) -> int:
    """Return the bytes that an engine may map, by its pool or its allocator; on any thread."""
    return limit_in_pool(manager) or pages_at_most(manager) * page_bytes(manager)


def limit_in_pool(manager: Any) -> int:
    """Return the limit in an engine's pool in /dev/shm; on any thread.

    0 where somebody removed the pool, or cut it off, or it says less than a byte of each layer,
    which is no limit to kvcached. Kvcached's lock of the pool is not taken: its thread that maps
    ahead waits for it with the allocator locked, and the engine waits for the allocator with
    Python's lock, without which whoever has the pool's lock could not give it back.
    """
    from kvcached.cli.utils import get_ipc_path

    try:
        with Path(get_ipc_path(manager.ipc_name)).open("rb", buffering=0) as pool:
            # The first field of ``MemInfoStruct``, which is written at once.
            size = int.from_bytes(pool.read(8), sys.byteorder, signed=True)
    except OSError:
        size = 0
    return size if size >= manager.num_layers * manager.num_kv_buffers else 0


def set_limit(manager: Any, size: int) -> bool:
    """Set the bytes that an engine may map, in its pool and at once; on the engine's thread.

    False if more is in use: kvcached then shrinks as blocks are freed. OSError: the pool is gone.
    """
    write_limit(manager, size)
    return bool(manager.resize(size // manager.num_layers // manager.num_kv_buffers))


def write_limit(manager: Any, size: int) -> None:
    """Write the bytes that an engine may map to its pool, on its thread; OSError if it is gone."""
    from kvcached.cli.utils import MemInfoStruct, RwLockedShm

    with RwLockedShm(manager.ipc_name, MemInfoStruct.SHM_SIZE, RwLockedShm.WLOCK) as pool:
        found = MemInfoStruct.from_buffer(pool)
        found.total_size = size
        found.write_to_buffer(pool)


def give_all_back(manager: Any) -> int | None:
    """Lower the limit to the pages in use, and give those back that are mapped ahead of use.

    Returns the limit, or None while kvcached's other thread is about to map pages ahead of use.
    """
    pages = pages_in_use(manager)
    manager.trim()
    if not manager.resize(pages * manager.page_size):
        return None
    manager.trim()  # what its thread mapped in between
    size = pages * page_bytes(manager)
    write_limit(manager, size)
    return size


def is_applied(manager: Any) -> bool:
    """Whether kvcached's thread has read the pool's limit; until then an earlier one applies."""
    reported = reported_limit(manager)
    wanted = limit(manager) // manager.num_layers // manager.num_kv_buffers
    return reported is None or reported == wanted


def reported_limit(manager: Any) -> int | None:
    """Return the limit that the next allocation applies, in bytes of the K or V of one layer."""
    reported = int(manager.page_allocator.get_resize_target())
    return reported if reported > 0 else None


def is_above_limit(manager: Any) -> bool:
    """Whether an engine has more pages than the next allocation would leave it."""
    reported = reported_limit(manager)
    return reported is not None and reported // manager.page_size < pages_in_use(manager)


def is_above_goal(manager: Any) -> bool:
    """Whether a manager that shrinks has more pages in use than it is to have."""
    goal = int(manager.target_num_blocks * manager.block_mem_size // manager.page_size)
    return int(manager.page_allocator.get_num_inuse_pages()) > goal


def retired(manager: Any) -> set[int]:
    """Return the pages that were freed and are not unmapped yet."""
    waiting = list(getattr(manager, "_retired_pages", None) or ())
    return {page for _, pages in waiting for page in pages}


def has_retired(manager: Any) -> bool:
    """Whether pages were freed that are not unmapped yet."""
    return bool(getattr(manager, "_retired_pages", None))


def pages_in_use(manager: Any) -> int:
    """Return the pages that have blocks, those included that were freed and not unmapped yet."""
    return int(manager.page_allocator.get_page_state()["inuse_pages"])


def pages_at_most(manager: Any) -> int:
    """Return the pages that the page allocator keeps to."""
    return int(manager.page_allocator.get_page_state()["total_pages"])


def block_of(pool: Any, key: bytes) -> int | None:
    """Return a block of kvcached's pool that is cached under a key; None if there is none.

    On vLLM releases with hash metadata of their own the pool keeps those, and no index beside them.
    """
    native = getattr(pool, "cached_block_hash_to_block", None)
    if native is not None:
        block = native.get_one_block(key)
        return None if block is None else int(block.block_id)
    blocks = pool._cached_blocks.get(key)
    return next(iter(blocks)) if blocks else None


class Page(NamedTuple):
    """The number and the blocks of a page, which are all cached, and used by no request."""

    number: int
    blocks: list[int]


def unused_pages(pool: Any, coldest: int) -> list[Page]:
    """Return the pages that no request uses, the coldest first, by the last used block of each.

    Only pages that are wholly among so many of the coldest blocks, which cost time.
    """
    manager = pool.kv_cache_manager
    blocks = list(itertools.islice(pool._evictable_blocks, coldest))
    places = dict(zip(blocks, itertools.count()))
    pages = manager.page_allocator.group_indices_by_page(blocks, manager.block_mem_size)
    there = manager.get_page_occupancy(list(pages))
    whole = [Page(*page) for page in pages.items() if len(page[1]) >= there.get(page[0], 0)]
    return sorted(whole, key=lambda page: max(map(places.__getitem__, page.blocks)))


def is_unused(pool: Any, page: Page) -> bool:
    """Whether all that is in a page is still cached, and used by no request."""
    there = pool.kv_cache_manager.get_page_occupancy([page.number])[page.number]
    unused = pool._evictable_blocks
    return 0 < there <= len(page.blocks) and all(map(unused.__contains__, page.blocks))
