"""Runs in an environment of ``environment`` on the emulated device: copies of a connector alone.

    python parts.py PART [ROW...]

Work on the stream of the computation writes a block of kvcached's memory, and a connector's own
copy class copies that block, or all memory is unmapped behind such a copy. The rows are taken out
before; ``EMU_COMPLAINTS`` has what the device says of it. It is run by its path, so that neither
the harness nor the checkout's kvpatch is there.
"""

from __future__ import annotations

import sys
import time
from typing import Any

PAGE = 2 << 20
BLOCK = 64 << 10  # bytes; vLLM copies blocks under 28 KiB by a Triton kernel


def memory() -> tuple[Any, Any]:
    """Return blocks on the device and in pinned memory: int8, (blocks, ``BLOCK``)."""
    import torch
    from kvcached import vmm_ops

    vmm_ops.init_kvcached("cuda:0", PAGE, False)
    (made, *_) = vmm_ops.create_kv_tensors(8 * PAGE, 2, "cuda:0", 2, 2, 0)
    vmm_ops.map_to_kv_tensors([0], 0)
    blocks = made.view(torch.int8).view(-1)[:PAGE].view(-1, BLOCK)
    return blocks, torch.zeros_like(blocks, device="cpu").pin_memory()


def offloading() -> None:
    """A load of OffloadingConnector into a block that the computation writes."""
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler

    blocks, tier = memory()
    refs = [[CanonicalKVCacheRef(0, BLOCK)]]
    loads = SingleDirectionOffloadingHandler([blocks], [tier], 1, refs, gpu_to_cpu=False)
    blocks[0].fill_(1)
    loads.transfer_async(0, CPULoadStoreSpec([0]), GPULoadStoreSpec([0], [1], [0]))


def simple() -> None:
    """A store and a load of SimpleCPUOffloadConnector, of blocks that the computation writes."""
    import torch
    from vllm.v1.simple_kv_offload import worker

    blocks, tier = memory()
    backend = worker.DmaCopyBackend()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    backend.init({"layer": blocks}, {"layer": tier}, blocks.device, *streams)
    events: list[Any] = []
    blocks[:2].fill_(1)
    backend.launch_copy([0], [0], True, 0, events)
    backend.launch_copy([1], [1], False, 1, events)
    backend.shutdown()


def ended() -> None:
    """A store of SimpleCPUOffloadConnector that is in flight when kvcached unmaps all memory."""
    import torch
    from kvcached import vmm_ops
    from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector as simple
    from vllm.v1.simple_kv_offload import copy_backend, worker

    blocks, tier = memory()
    connector = object.__new__(simple.SimpleCPUOffloadConnector)
    connector.worker_handler = handler = worker.SimpleCPUOffloadWorker(None, None, 0)
    handler._backend = backend = copy_backend.DmaCopyBackend()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    backend.init({"layer": blocks}, {"layer": tier}, blocks.device, *streams)
    backend.launch_copy([0], [0], True, 0, handler._store_events)
    while not handler._store_events:
        time.sleep(0.01)
    connector.shutdown()
    vmm_ops.shutdown_kvcached()


PARTS = {part.__name__: part for part in (offloading, simple, ended)}


def main(part: str, *rows: str) -> None:
    """Run a part without some rows."""
    import torch
    import vllm  # noqa: F401

    from kvpatch import activation

    for row in rows:
        assert activation.transaction.revert(row), f"{row} is not there"
    PARTS[part]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
