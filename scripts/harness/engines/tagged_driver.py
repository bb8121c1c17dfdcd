"""Tags every block through the model's views, and finds the tags in what a connector copies.

    python -m harness.engines.tagged_driver RESULT.json

Runs in the environment of a release, without an engine: vLLM's own planning, its views on
kvcached's memory, its coordinator with kvcached's block pool, and the regions that its
OffloadingConnector registers. For each kind of model and each layout it can have.
"""

import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheLayout,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu import attn_utils

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

from kvcached.integration.vllm import interfaces, model_runner_v2

from kvpatch import activation
from kvpatch.patches.kvcached_adapters import adapters
from kvpatch.status import record
from kvpatch.upstream import kvcached_api
from kvpatch.versions import installed

RELEASE = installed("vllm")[0].public
BLOCK, BLOCKS, USED = 32, 600, 70
PAGE = 2 * 2 * 32 * BLOCK * 4  # K and V of two heads of 32 float32


def attention(kind: type = FullAttentionSpec, **more: Any) -> Any:
    return kind(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, **more)


def groups(kind: str) -> list[KVCacheGroupSpec]:
    """The KV cache groups of a kind of model, four layers each."""
    names = [f"model.layers.{index}.attn" for index in range(4)]
    window = attention(SlidingWindowSpec, sliding_window=64)
    latent = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((4, 32), (8, 16)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=PAGE,
        mamba_cache_mode="align",
    )
    return {
        "full": lambda: [KVCacheGroupSpec(names, attention())],
        "sliding": lambda: [
            KVCacheGroupSpec(names[:2], attention()),
            KVCacheGroupSpec(names[2:], window),
        ],
        "latent": lambda: [KVCacheGroupSpec(names, latent)],
        "hybrid": lambda: [
            KVCacheGroupSpec(names[:2], attention()),
            KVCacheGroupSpec(names[2:], state),
        ],
    }[kind]()


def plan(kind: str, layout: KVCacheLayout) -> tuple[Any, Any]:
    """vLLM's own configuration of the KV cache: (VllmConfig, KVCacheConfig)."""
    config = VllmConfig()
    config.cache_config.kv_cache_layout = layout.name
    config.cache_config.num_gpu_blocks_override = BLOCKS
    made = groups(kind)
    takes = inspect.signature(get_kv_cache_config_from_groups).parameters
    size = {"num_blocks": BLOCKS} if "num_blocks" in takes else {"available_memory": 1 << 28}
    return config, get_kv_cache_config_from_groups(config, made, **size)


def coordinator(config: Any) -> Any:
    """vLLM's coordinator, with kvcached's block pool in it."""
    return kv_cache_coordinator.get_kv_cache_coordinator(
        kv_cache_config=config,
        max_model_len=4096,
        max_in_flight_tokens=4096,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=True,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def look(kind: str, layout: KVCacheLayout) -> dict[str, Any]:
    vllm_config, config = plan(kind, layout)
    interfaces.init_kvcached(is_worker=True, device="cuda:0")
    token = model_runner_v2._persistent_allocation.set(True)
    try:
        caches = attn_utils.allocate_kv_cache(
            config, torch.device("cuda:0"), layout, [BLOCK] * len(config.kv_cache_groups)
        )
    finally:
        model_runner_v2._persistent_allocation.reset(token)
    pool = coordinator(config).block_pool
    blocks = [block.block_id for block in pool.get_new_blocks(USED)]
    layers = [group.layer_names for group in config.kv_cache_groups]
    # One group owns a block; the tag says which of its layers, and which block.
    owner = {block: index % len(layers) for index, block in enumerate(blocks)}
    tags = {}
    for block, group in owner.items():
        for position, name in enumerate(layers[group]):
            tags[block, position] = block * 16 + position
            view = caches[name][block]
            view.view(torch.int32).fill_(tags[block, position])
    pages = max(map(len, layers))
    page_bytes = config.kv_cache_tensors[0].size // config.num_blocks // pages
    captured: list[Any] = []
    spec = SimpleNamespace(
        replicated_layout=False,
        config=SimpleNamespace(
            canonical_layout=False,
            parallel=SimpleNamespace(rank=0),
            worker_kv_bytes_per_block=pages * page_bytes,
        ),
        get_worker=captured.append,  # what it is given are the regions
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1, prefill_context_parallel_size=1, world_size=2, rank=0
    )
    # What registration reads of a ``VllmConfig``.
    read = SimpleNamespace(
        parallel_config=parallel, cache_config=vllm_config.cache_config, model_config=None
    )
    worker = OffloadingConnectorWorker(spec, read, config)
    worker.register_kv_caches(caches)
    (regions,) = captured
    wrong = 0
    for block, group in owner.items():
        rows = []
        for ref in regions.group_data_refs[group]:
            row = regions.tensors[ref.tensor_idx].tensor[block]
            rows += list(row.view(torch.int32).view(-1, page_bytes // 4))
        for position in range(len(layers[group])):
            found = rows[position]
            used = int((found != 0).sum()) if kind == "hybrid" else found.numel()
            # A state is smaller than its page, which vLLM pads; what is there is the tag.
            if not used or not bool((found[:used] == tags[block, position]).all()):
                wrong += 1
    pool.free_blocks([pool.blocks[block] for block in blocks])
    interfaces.shutdown_kvcached()
    return {
        "regions": len(regions.tensors),
        "tags": len(tags),
        "wrong": wrong,
        "on_kvcached": all(kvcached_api.on_kvcached(cache) for cache in caches.values()),
        "pool": type(pool).__name__,
        "events": pool.enable_kv_cache_events,
        "lookahead": getattr(pool, "num_hash_lookahead_tokens", None),
    }


def worker_functions() -> dict[str, Any]:
    """Call what is patched of a GPU worker, as vLLM calls it, and say what it did.

    On a CPU no engine comes here: the CPU worker has its own.
    """
    snapshot = SimpleNamespace(total_memory=100 << 30, free_memory=10 << 30, device_="cuda:0")
    budget = SimpleNamespace(gpu_memory_utilization=0.5)
    external = (3 << 30,) if RELEASE >= "0.32" else ()
    seen: dict[str, Any] = {"budget": gpu_worker.request_memory(snapshot, budget, *external) >> 30}
    if RELEASE < "0.31":
        return seen

    class Runner:
        def profile_run(self, randomize_inputs: bool = True) -> None:
            seen["random"] = randomize_inputs
            seen["current"] = get_current_vllm_config() is worker.vllm_config

    worker = object.__new__(gpu_worker.Worker)
    worker.model_runner, worker.vllm_config = Runner(), VllmConfig()
    worker.parallel_config = worker.vllm_config.parallel_config
    wrapped = worker.model_runner.profile_run
    adapters.profile_as_vllm(lambda: worker.model_runner.profile_run() or 0, worker, (), {})
    seen["left as it was"] = worker.model_runner.profile_run == wrapped
    return seen


def main(result_path: str) -> None:
    contiguous = os.environ["KVCACHED_CONTIGUOUS_LAYOUT"] == "true"
    names = ("BLHNC", "BLNHC") if contiguous else ("LBHNC", "LBNHC")
    features = record.describe()["features"]
    found = {
        f"{kind}-{name}": look(kind, KVCacheLayout[name])
        for kind in ("full", "sliding", "latent", "hybrid")
        for name in names
    }
    result = {
        "features": features,
        "patches": [applied.patch.id for applied in activation.transaction.applied],
        "found": found,
        "worker": worker_functions(),
    }
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
