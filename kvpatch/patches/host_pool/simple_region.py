"""The workers' side of SimpleCPUOffloadConnector: its CPU tensors are views of the tier's file.

vLLM makes a tensor of CPU blocks for each region of the KV cache, writes zeros to all of it and
registers it with the device.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.patches.host_pool import presence
from kvpatch.pool import ledger, stripes
from kvpatch.pool.ranks import Rank
from kvpatch.pool.stripes import Stripes
from kvpatch.upstream.vllm_api import region_path


class Shared:
    """What a worker has of its engine's tier; kept on the ``SimpleCPUOffloadWorker``."""

    def __init__(self, worker: Any, pin: Callable[[Any], None] | None) -> None:
        transfer = worker.vllm_config.kv_transfer_config
        parallel = worker.vllm_config.parallel_config
        self._record = ledger.record_of(presence.home(), transfer.engine_id)
        self._path = region_path(transfer.engine_id)
        self._index, self._ranks = int(parallel.rank), int(parallel.world_size)
        self._pin = pin
        self._slices: dict[int, Any] = {}  # what is registered, by its place in the file
        self._rank: Rank | None = None
        self._held = -1

    def map(self, caches: dict[str, Any], blocks: int) -> dict[str, Any]:
        """Return a view of the tier's file for each region, of shape [blocks, ...].

        Args:
            caches: the device's regions, of shape [device blocks, ...].
            blocks: of the CPU tier, on this rank.
        """
        import torch

        regions = tuple(cache[0].nbytes for cache in caches.values())
        self._stripes = Stripes(blocks, regions, self._ranks)
        file = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            os.ftruncate(file, self._stripes.size)  # every worker does, to the same size
            mapping = mmap.mmap(file, self._stripes.size)
        finally:
            os.close(file)
        self._whole = torch.frombuffer(mapping, dtype=torch.uint8)
        views = {}
        for region, (name, cache) in enumerate(caches.items()):
            begin = self._stripes.begin(self._index, region)
            view = self._whole[begin : begin + blocks * regions[region]]
            views[name] = view.view(cache.dtype).view(blocks, *cache.shape[1:])
        self._held = ledger.hold(self._record)
        try:
            told = stripes.pack(regions)
            self._rank = Rank(ledger.socket_of(self._record), self._register, told)
        except BaseException:
            os.close(self._held)
            raise
        return views

    def close(self) -> None:
        """Deregister what is registered, and let the engine's memory go."""
        if self._rank is not None:
            self._rank.close()
            os.close(self._held)

    def _register(self, wanted: bool, offset: int, size: int) -> bool:
        if self._pin is None:
            return True
        ranges = list(self._stripes.of_rank(self._index, offset, size))
        if not wanted:
            return all(self._deregister(first) for first, _ in ranges)
        try:
            for first, length in ranges:
                one = self._whole[first : first + length]
                self._pin(one)
                self._slices[first] = one
        except RuntimeError:
            for first, _ in ranges:
                self._deregister(first)
            return False
        return True

    def _deregister(self, first: int) -> bool:
        from vllm.v1.simple_kv_offload.cuda_mem_ops import torch

        one = self._slices.get(first)
        if one is not None:
            if int(torch.cuda.cudart().cudaHostUnregister(one.data_ptr())) != 0:
                return False
            del self._slices[first]
        return True


def around_tensors(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Let what copies have views of the tier's file, in place of tensors that vLLM would write."""
    from vllm.v1.simple_kv_offload import worker as vllms

    caches: dict[str, Any] = argument(args, kwargs, 0, "unique_gpu_caches")
    shared = Shared(instance, vllms.pin_tensor if vllms.PIN_MEMORY else None)
    instance.cpu_kv_caches = shared.map(caches, instance.num_cpu_blocks)
    instance._backend = backend = vllms.DmaCopyBackend()
    device = argument(args, kwargs, 2, "device")
    streams = instance.load_stream, instance.store_stream
    backend.init(caches, instance.cpu_kv_caches, device, *streams)
    state.attach(instance, shared)


def around_shutdown(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Deregister the extents when no copy is in flight any more."""
    result = wrapped(*args, **kwargs)
    worker = instance.worker_handler
    shared = state.find(worker, Shared)
    if shared is not None:
        state.drop(worker, Shared)
        shared.close()
    return result
