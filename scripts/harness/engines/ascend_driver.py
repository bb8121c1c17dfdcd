"""vllm-ascend's worker and its compiled copies on kvcached's pools of an emulated NPU.

Runs in the environment ``ascend-0.23.0``; prints what each scenario saw as one line of JSON. A
scenario applies the rows that it names, and reverts them.
"""

import ctypes
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch_npu  # noqa: F401 - torch.npu
from kvcached.integration.vllm import interfaces
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
from vllm_ascend.simple_kv_offload.worker import SimpleCPUOffloadNPUWorker
from vllm_ascend.utils import enable_custom_op

from kvpatch import gate
from kvpatch.hostdevice import ledger
from kvpatch.patch import Transaction
from kvpatch.patches.ascend import FEATURE, standing
from kvpatch.patches.elastic_memory import FEATURE as OF_ENGINES
from kvpatch.patches.fence import hooks

BLOCKS, TOKENS, HEADS, SIZE, LAYERS = 64, 16, 2, 64, 2
STORED = [3, 7, 40]
_HOST_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_acl = ctypes.CDLL("libascendcl.so")
_kept: list[Any] = []


@contextmanager
def rows(*names: str) -> Iterator[None]:
    """Apply rows of the feature for the block."""
    transaction = Transaction()
    transaction.apply_all(patch for patch in FEATURE.patches if patch.id in names)
    try:
        yield
    finally:
        transaction.revert_to(0)


@contextmanager
def computing() -> Iterator[Callable[[], None]]:
    """Hold the computation's stream; what is put on it runs once the yielded call was made."""
    go = threading.Event()
    hold = _HOST_CALL(lambda _: (go.wait(), None)[1])
    _kept.append(hold)
    stream = torch.npu.current_stream()
    assert _acl.aclrtLaunchHostFunc(ctypes.c_void_p(stream.npu_stream), hold, None) == 0
    try:
        yield go.set
    finally:
        go.set()
        stream.synchronize()


def pools() -> dict[str, tuple[Any, Any]]:
    """Return K and V per layer as kvcached lays them out: the halves of a pool per layer."""
    interfaces.init_kvcached(device="npu:0")
    tensors = interfaces.alloc_kv_cache(
        (2, BLOCKS, TOKENS, HEADS, SIZE), TOKENS, torch.bfloat16, "npu:0", LAYERS
    )
    page = interfaces.PAGE_SIZE
    assert torch.ops.kvcached.map_to_kv_tensors([0, page], 0)
    caches = {}
    for layer, tensor in enumerate(tensors):
        key, value = tensor[0], tensor[1]
        key._kvcached_block_copy_view = tensor._kvcached_block_copy_view
        caches[f"layer{layer}"] = (key, value)
    return caches


def plan(caches: dict[str, Any]) -> KVCacheConfig:
    """Return vLLM's plan of these layers."""
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16
    )
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(size=BLOCKS * spec.page_size_bytes, shared_by=[name]) for name in caches
        ],
        kv_cache_groups=[KVCacheGroupSpec(list(caches), spec)],
    )


TIER = 1 << 20


def worker_of(caches: dict[str, Any]) -> Any:
    """Return vllm-ascend's worker with these caches registered."""
    worker = SimpleCPUOffloadNPUWorker(None, plan(caches), TIER)
    worker.register_kv_caches(caches)
    return worker


def fill(caches: dict[str, Any]) -> dict[tuple[str, int], Any]:
    """Write other bytes to every block of K and of V; return them."""
    written = {}
    for number, (name, halves) in enumerate(caches.items()):
        for half, tensor in enumerate(halves):
            content = torch.arange(BLOCKS * TOKENS * HEADS * SIZE).to(torch.int16)
            content = (content * 7 + 1000 * number + 300 * half).view(torch.bfloat16)
            content = content.view(BLOCKS, TOKENS, HEADS, SIZE)
            for block in STORED:
                tensor[block].copy_(content[block])
            written[name, half] = content
    torch.npu.synchronize()
    return written


def transfer(worker: Any, **blocks: Any) -> None:
    """Let the worker launch and finish one step's transfers."""
    empty: dict[str, Any] = {"load_event": -1, "store_event": -1}
    metadata = SimpleCPUOffloadMetadata(**{**empty, **blocks})
    worker.bind_connector_metadata(metadata)
    worker.get_finished(set())
    worker.clear_connector_metadata()


def finish(worker: Any) -> None:
    """Wait for the launched transfers."""
    while worker._pending_store_event_indices or worker._pending_load_event_indices:
        worker.get_finished(set())


def store(worker: Any, event: int, npu: list[int], cpu: list[int]) -> None:
    transfer(worker, store_event=event, store_gpu_blocks=npu, store_cpu_blocks=cpu)


def load(worker: Any, event: int, cpu: list[int], npu: list[int]) -> None:
    transfer(worker, load_event=event, load_gpu_blocks=npu, load_cpu_blocks=cpu)


def wrong(caches: dict[str, Any], written: dict[tuple[str, int], Any]) -> list[str]:
    """Return the halves of blocks whose bytes are not those that were written."""
    return [
        f"{name} {'KV'[half]} {block}"
        for name, halves in caches.items()
        for half, tensor in enumerate(halves)
        for block in STORED
        if not torch.equal(
            tensor[block].cpu().view(torch.int16), written[name, half][block].view(torch.int16)
        )
    ]


def around_trip(caches: dict[str, Any]) -> dict[str, Any]:
    """Store three blocks, erase them on the device, load them."""
    written = fill(caches)
    worker = worker_of(caches)
    batches = _acl.kvpatch_acl_batches()
    tier = list(range(len(STORED)))
    store(worker, 0, STORED, tier)
    finish(worker)
    zero = torch.zeros(TOKENS, HEADS, SIZE, dtype=torch.bfloat16)
    for halves in caches.values():
        for tensor in halves:
            for block in STORED:
                tensor[block].copy_(zero)
    torch.npu.synchronize()
    erased = len(wrong(caches, written))
    load(worker, 0, tier, STORED)
    finish(worker)
    worker._backend.shutdown()
    scheduler = SimpleCPUOffloadScheduler._derive_cpu_config(worker.kv_cache_config, TIER)
    return {
        "erased": erased,
        "wrong": wrong(caches, written),
        "batches": _acl.kvpatch_acl_batches() - batches,
        "worker's tier": worker.num_cpu_blocks,
        "scheduler's tier": scheduler.num_blocks,
    }


def store_while_computing(caches: dict[str, Any]) -> list[str]:
    """Store blocks whose computation is still queued; return what was not stored as computed."""
    worker = worker_of(caches)
    new = torch.full((TOKENS, HEADS, SIZE), 5, dtype=torch.bfloat16).pin_memory()
    with computing() as compute:
        for halves in caches.values():
            for tensor in halves:
                for block in STORED:
                    tensor[block].copy_(new, non_blocking=True)
        store(worker, 0, STORED, [0, 1, 2])
        worker._backend.shutdown()  # every copy is queued now, behind what it waits for
        if worker._store_events[0][1].query():
            compute()  # it did not wait
        compute()
        finish(worker)
    return [
        name
        for name, tier in worker.cpu_kv_caches.items()
        if not torch.equal(
            tier[: len(STORED)].view(torch.bfloat16),
            torch.full((len(STORED), TOKENS * HEADS * SIZE), 5, dtype=torch.bfloat16),
        )
    ]


def unmap_under_store(caches: dict[str, Any], fenced: bool) -> list[str]:
    """Free the page of blocks whose store is queued; return what was stored wrong.

    Args:
        caches: as ``pools`` makes them.
        fenced: the page is released when the fence permits it, instead of at once.
    """
    from kvpatch.patches.fence.fence import Fence, Transfer

    written = fill(caches)
    worker = worker_of(caches)
    page = interfaces.PAGE_SIZE
    per_page = page // (TOKENS * HEADS * SIZE * 2)
    fence = Fence(lambda number: (number * per_page, (number + 1) * per_page), workers=1)
    retired: list[tuple[int, list[int]]] = [(1, [0])]

    def release() -> None:
        nonlocal retired
        released, retired = fence.split(retired, False) if fenced else ([0], [])
        if released:
            torch.npu.current_stream().synchronize()
            assert torch.ops.kvcached.unmap_from_kv_tensors([one * page for one in released], 0)

    with ledger.hold_copies():
        fence.plan([(0, Transfer("request", tuple(STORED)))], epoch=1)
        store(worker, 0, STORED, [0, 1, 2])
        worker._backend.shutdown()
        release()
    finish(worker)
    fence.report(0, 1)
    if retired:
        release()
    assert not retired
    assert torch.ops.kvcached.map_to_kv_tensors([0], 0)
    lost = []
    halves = [(name, half) for name in caches for half in (0, 1)]
    for (name, half), tier in zip(halves, worker.cpu_kv_caches.values(), strict=True):
        for position, block in enumerate(STORED):
            wanted = written[name, half][block].reshape(-1).view(torch.int16)
            if not torch.equal(tier[position].view(torch.int16), wanted):
                lost.append(f"{name} {'KV'[half]} {block}")
    return lost


def barrier(caches: dict[str, Any]) -> dict[str, bool]:
    """Ask the fence's barrier while the computation is held."""
    worker = SimpleNamespace(device=torch.device("npu:0"))
    returned = threading.Event()

    def ask() -> None:
        torch.npu.set_device(0)
        with torch.npu.stream(stream):
            assert hooks.compute_barrier(worker)
        returned.set()

    with computing() as compute:
        stream = torch.npu.current_stream()
        thread = threading.Thread(target=ask)
        thread.start()
        early = returned.wait(0.2)
        compute()
        thread.join()
    return {"returned before the computation": early, "returned": returned.is_set()}


def replaced() -> dict[str, list[str]]:
    """Return which rows of the engine's start are not in force, before and after vllm-ascend's own.

    It assigns ``EngineCore.__init__`` when profiled chunks are configured.
    """
    transaction = Transaction()
    transaction.apply_all(
        one for one in OF_ENGINES.patches if one.id == "elastic_memory.engine_core"
    )
    found = {}
    for when, module in (("before", "worker"), ("after", "patch.platform.patch_profiling_chunk")):
        importlib.import_module(f"vllm_ascend.{module}")
        found[when] = [one.patch.id for one in standing.displaced(transaction.applied, object)]
    transaction.revert_to(0)
    return found


def sleeping() -> str:
    """Return the error that a sleep ends with, which resets the connector; empty for none."""
    try:
        SimpleCPUOffloadConnector.reset_cache(SimpleNamespace())
    except NotImplementedError as error:
        return str(error)
    return ""


def main() -> None:
    """Run every scenario."""
    torch.npu.set_device(0)
    assert enable_custom_op()
    # First in a worker too; what it imports imports each other, and cannot be begun elsewhere.
    importlib.import_module("vllm_ascend.worker.worker")
    seen: dict[str, Any] = {}
    seen["targets"] = {patch.id: gate.check_target(patch).reason for patch in FEATURE.patches}
    device = ("ascend.torch", "ascend.device_name", "ascend.listener_device")
    register, order = "ascend.register_kv_caches", "ascend.copies_in_order"
    with rows(*device):
        caches = pools()
        seen["memory"] = [caches["layer0"][0].device.type, ledger.memory()[0] >> 20]
        seen["unpatched"] = around_trip(caches)
        with rows(register, order):
            seen["patched"] = around_trip(caches)
        with rows(register):
            seen["stale without the row"] = store_while_computing(caches)
        with rows(register, order):
            seen["stale with the row"] = store_while_computing(caches)
            seen["lost without the fence"] = unmap_under_store(caches, fenced=False)
            seen["lost with the fence"] = unmap_under_store(caches, fenced=True)
        seen["barrier"] = barrier(caches)
    seen["sleeping"] = sleeping()
    seen["replaced"] = replaced()
    print(json.dumps(seen))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
