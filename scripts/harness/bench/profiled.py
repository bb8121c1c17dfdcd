"""The profiled functions, each in a process of its own: ``python -m harness.bench.profiled``."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from harness import connectors, inprocess
from harness.bench.sizes import BLOCK_BYTES, BLOCK_TOKENS

TRANSFER = 4096  # blocks
ROW = 64 << 10  # bytes of a block


def engine(model: str) -> Any:
    """An engine in this process, on elastic memory too small for its load, with a CPU tier."""
    connector = connectors.offloading(1024 * BLOCK_BYTES)
    sizes = {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": 416, "max_num_seqs": 16}
    return inprocess.engine(model, kv_transfer_config=connector, **sizes)


def steps(model: str, seconds: float) -> None:
    """Step an engine that stores, evicts, loads and frees in every step."""
    from vllm import SamplingParams

    llm = engine(model)
    source = random.Random(1)
    prompts = [
        {"prompt_token_ids": [source.randrange(2, 258) for _ in range(640)]} for _ in range(40)
    ]
    parameters = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        source.shuffle(prompts)
        llm.generate(prompts[:24], parameters, use_tqdm=False)


def back_and_forth(worker: Any, device: Any, tier: Any, seconds: float) -> None:
    """Store and load the same blocks until the time is over."""
    from kvpatch.hostdevice import streams

    end = time.monotonic() + seconds
    for job in range(1 << 30):
        if time.monotonic() > end:
            break
        worker.submit_store(2 * job, device, tier)
        worker.submit_load(2 * job + 1, tier, device)
        streams.synchronize()
        worker.get_finished()


def transfers(model: str, seconds: float) -> None:
    """Store and load 4,096 blocks, again and again, without an engine around it."""
    import torch
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

    from kvpatch.hostdevice import offloading
    from kvpatch.patches.elastic_memory.regions import Regions
    from kvpatch.patches.offloading.registration import canonical

    region = torch.zeros((TRANSFER, ROW), dtype=torch.int8)
    regions = Regions([region], [[0]])
    offloading.prepare()  # vLLM's worker then has the host device's streams
    worker = CPUOffloadingWorker(canonical(regions), 1, TRANSFER)
    order = list(range(TRANSFER))
    random.Random(1).shuffle(order)
    device = GPULoadStoreSpec(order, group_sizes=[TRANSFER], block_indices=[0])
    tier = CPULoadStoreSpec(order[::-1])
    back_and_forth(worker, device, tier, seconds)
    worker.shutdown()


if __name__ == "__main__":
    which, folder, duration = sys.argv[1:]
    {"steps": steps, "transfers": transfers}[which](folder, float(duration))
