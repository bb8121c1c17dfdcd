"""The copy path of each connector: vLLM's own on a GPU, the host device's in a dry run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from kvpatch.patches.elastic_memory.regions import Regions
from kvpatch.patches.offloading.registration import canonical

HOLD_CYCLES = 2_000_000_000  # of the GPU's clock: about a second


class Copier(Protocol):
    """Copies blocks between the device and a CPU tier of as many rows."""

    def store(self, blocks: list[int], rows: list[int]) -> None:
        """Launch copies to the tier."""

    def load(self, rows: list[int], blocks: list[int]) -> None:
        """Launch copies from the tier."""

    def wait(self) -> None:
        """Wait for everything launched."""

    def close(self) -> None:
        """Finish, and free the tier."""


class Offloading:
    """OffloadingConnector's worker."""

    def __init__(self, regions: Regions, rows: int, gpu: bool) -> None:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
        from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

        if not gpu:
            importlib.import_module("kvpatch.hostdevice.offloading")  # gives it streams
        self._device, self._tier = GPULoadStoreSpec, CPULoadStoreSpec
        self._worker: Any = CPUOffloadingWorker(canonical(regions), 1, rows)
        self._jobs: set[int] = set()
        self._next = 0

    def _job(self) -> int:
        self._next += 1
        self._jobs.add(self._next)
        return self._next

    def _spec(self, blocks: list[int]) -> Any:
        return self._device(blocks, group_sizes=[len(blocks)], block_indices=[0])

    def store(self, blocks: list[int], rows: list[int]) -> None:
        """Launch copies to the tier."""
        self._worker.submit_store(self._job(), self._spec(blocks), self._tier(rows))

    def load(self, rows: list[int], blocks: list[int]) -> None:
        """Launch copies from the tier."""
        self._worker.submit_load(self._job(), self._tier(rows), self._spec(blocks))

    def wait(self) -> None:
        """Wait for everything launched."""
        self._worker.wait(self._jobs)
        self._worker.get_finished()
        self._jobs.clear()

    def close(self) -> None:
        """Finish, and free the tier."""
        self._worker.shutdown()


class Simple:
    """SimpleCPUOffloadConnector's backend; eager and lazy mode differ in the scheduler only."""

    def __init__(self, regions: Regions, rows: int, gpu: bool) -> None:
        device = {f"region{at}": tensor for at, tensor in enumerate(regions.tensors)}
        # The backend keeps addresses alone.
        self._tier = {
            name: torch.zeros((rows, tensor.shape[1]), dtype=torch.int8, pin_memory=gpu)
            for name, tensor in device.items()
        }
        # vLLM's own names, which are the host device's in a dry run.
        from vllm.v1.simple_kv_offload import worker

        self._torch = worker.torch
        self._streams = [self._torch.cuda.Stream() for _ in range(2)]
        self._backend: Any = worker.DmaCopyBackend()
        where = next(iter(device.values())).device
        self._backend.init(device, self._tier, where, *self._streams)
        self._launched = 0
        self._events: list[tuple[int, Any]] = []

    def _launch(self, source: list[int], target: list[int], is_store: bool) -> None:
        ready = self._torch.Event()
        ready.record(self._torch.cuda.current_stream())
        # vLLM's worker launches a load when its blocks are free; here its stream waits.
        self._streams[0].wait_event(ready)
        self._launched += 1
        self._backend.launch_copy(source, target, is_store, self._launched, self._events, ready)

    def store(self, blocks: list[int], rows: list[int]) -> None:
        """Launch copies to the tier."""
        self._launch(blocks, rows, is_store=True)

    def load(self, rows: list[int], blocks: list[int]) -> None:
        """Launch copies from the tier."""
        self._launch(rows, blocks, is_store=False)

    def wait(self) -> None:
        """Wait for everything launched."""
        while len(self._events) < self._launched:  # a thread launches them
            torch.empty(0)
        for _, event in self._events:
            event.synchronize()

    def close(self) -> None:
        """Finish, and free the tier."""
        self._backend.shutdown()


CONNECTORS: dict[str, Callable[[Regions, int, bool], Copier]] = {
    "OffloadingConnector": Offloading,
    "SimpleCPUOffloadConnector": Simple,
}


@contextmanager
def held(gpu: bool) -> Iterator[None]:
    """Keep copies that are launched inside from running until the block ends.

    On a GPU they wait for a kernel that sleeps on the compute stream, which they follow; the
    block is short against it, and its user checks that they had not ended.
    """
    if gpu:
        torch.cuda._sleep(HOLD_CYCLES)
        yield
        return
    from kvpatch.hostdevice.ledger import hold_copies

    with hold_copies():
        yield


def synchronize(gpu: bool) -> None:
    """Wait for the whole device."""
    if gpu:
        torch.cuda.synchronize()
