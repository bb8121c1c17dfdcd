"""vLLM's CPU tier with tiers behind it, without an engine: blocks that are full of one byte."""

import inspect
import time
import uuid
from collections.abc import Iterable
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvpatch.upstream.vllm_api import chunks_of, lookup_results

ROW = 8192  # bytes of a block
BLOCKS = 8  # of the CPU tier
LONG = 60.0  # seconds in which whatever can be answered is


def arguments(folder: Path, **changes: Any) -> tuple[Any, ...]:
    """What vLLM gives to an offloading spec, of an engine with one rank."""
    extra = {
        "cpu_bytes_to_use": changes.get("blocks", BLOCKS) * ROW,
        "secondary_tiers": changes.get(
            "tiers", [{"type": "fs", "root_dir": str(folder), "n_read_threads": 1}]
        ),
        **changes.get("extra", {}),
    }
    if util.find_spec("vllm.v1.kv_offload.config") is None:
        return whole_config(extra, changes)
    return (config(extra, changes),)


def whole_config(extra: dict[str, Any], changes: dict[str, Any]) -> tuple[Any, Any]:
    """The whole configuration and the KV cache's, which a spec is given up to 0.25.

    From 0.26 on they are the planner's alone.
    """
    from vllm.v1 import kv_cache_interface as caches

    spec = caches.FullAttentionSpec(
        block_size=changes.get("tokens_per_block", 32),
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float16,
    )
    engine = SimpleNamespace(
        instance_id=str(uuid.uuid4()),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        kv_events_config=None,
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=changes.get("parallel__world_size", 1),
            tensor_parallel_size=changes.get("parallel__tp_size", 1),
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(
            block_size=spec.block_size,
            cache_dtype=changes.get("model__dtype", "float16"),
            enable_prefix_caching=True,
            prefix_cache_retention_interval=None,
        ),
        speculative_config=None,
        model_config=SimpleNamespace(model=changes.get("model__name", "a/model")),
        use_v2_model_runner=False,
    )
    # Only a spec reads the tensors, which have other fields in later releases.
    shared = "shared_by" in inspect.signature(caches.KVCacheTensor).parameters
    return engine, caches.KVCacheConfig(
        num_blocks=1,
        kv_cache_tensors=[caches.KVCacheTensor(size=ROW, shared_by=["layer.0"])] if shared else [],
        kv_cache_groups=[caches.KVCacheGroupSpec(["layer.0"], spec)],
    )


def config(extra: dict[str, Any], changes: dict[str, Any]) -> Any:
    """What of it a spec is given from 0.26 on."""
    from vllm.v1.kv_offload import config as parts

    sections: dict[str, dict[str, Any]] = {
        "parallel": {
            "rank": 0,
            "world_size": 1,
            "tp_size": 1,
            "pp_size": 1,
            "pcp_size": 1,
            "dcp_size": 1,
            "data_parallel_index": 0,
            "data_parallel_size": 1,
            "data_parallel_rank_local": None,
            "is_parallelism_agnostic": True,
        },
        "model": {"name": "a/model", "dtype": "float16"},
        "cache": {"tokens_per_hash": 32, "blocks_per_chunk": 1},
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            sections[section][field] = value
    # What a release's own configuration does not have, it does not read.
    known = parts.OffloadingParallelConfig.__dataclass_fields__
    parallel = {name: value for name, value in sections["parallel"].items() if name in known}
    group = {"tokens_per_block": changes.get("tokens_per_block", 32), "layer_names": ("layer.0",)}
    if "group_id" in parts.OffloadingGroupConfig.__dataclass_fields__:  # vLLM 0.30
        group["group_id"] = 0
    return parts.OffloadingConfig(
        groups=(parts.OffloadingGroupConfig(**group),),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=str(uuid.uuid4()),
        parallel=parts.OffloadingParallelConfig(**parallel),
        model=parts.OffloadingModelConfig(**sections["model"]),
        cache=parts.OffloadingCacheConfig(**sections["cache"]),
    )


def region_of_worker(spec: Any, config: Any) -> Any:
    """Map what a worker with rank 0 maps, before the scheduler does."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    # The latter up to 0.25.
    size = getattr(spec, "kv_bytes_per_chunk", 0) or spec.kv_bytes_per_offloaded_block
    name = getattr(config, "engine_id", None) or config.instance_id  # the latter up to 0.25
    return SharedOffloadRegion(
        name, chunks_of(spec), 0, size, getattr(spec, "cpu_page_size_per_worker", size)
    )


def rows_of(spec: Any) -> Iterable[Any]:
    """The rows of the CPU tier that a transfer names: blocks, from vLLM 0.30 on chunks."""
    rows: Iterable[Any] = spec.chunk_ids if hasattr(spec, "chunk_ids") else spec.block_ids
    return rows


class Tiers:
    """A CPU tier with tiers behind it, stepped as the scheduler steps them."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        self.base = base
        given = arguments(folder, **changes)
        self.spec = TieringOffloadingSpec(*given)
        self.region = region_of_worker(self.spec, given[0])
        self.manager = self.spec.get_manager()
        self.region.cleanup()
        self.primary = self.manager.primary_tier
        self.tier = self.manager.secondary_tiers[0]
        self._requests = 0

    def key(self, number: int) -> Any:
        return self.base.make_offload_key(number.to_bytes(32, "big"), 0)

    def file(self, number: int) -> Path:
        return Path(self.tier.file_mapper.get_file_name(self.key(number)))

    def request(self, **more: Any) -> Any:
        self._requests += 1
        context = self.base.ReqContext(req_id=f"{self._requests}", **more)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        told = getattr(self.base, "ScheduleEndContext", None)  # up to 0.24 nothing is said
        self.manager.on_schedule_end(
            *([told(new_req_ids=(), preempted_req_ids=())] if told is not None else ())
        )

    def store(self, *numbers: int, ended: bool = False) -> None:
        """Store blocks, block n full of bytes n, and bring them to the tiers.

        With ``ended``, of a request that has finished before.
        """
        context = self.request()
        if ended:
            self.manager.on_request_finished(context)
        output = self.manager.prepare_store([self.key(number) for number in numbers], context)
        assert output is not None
        for key, block in zip(output.keys_to_store, rows_of(output.store_spec), strict=True):
            np.asarray(self.primary.get_kv_memoryview())[int(block)] = key[31]
        if output.keys_to_store:
            self.manager.complete_store(output.keys_to_store, context)
        for tier in self.manager.secondary_tiers:
            if not getattr(tier, "late", False):
                tier.drain_jobs()
        self.step()
        if not ended:
            self.manager.on_request_finished(context)

    def forget(self) -> None:
        """Lose what the CPU tier holds."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # from 0.33 on promotions wait for it
            self.manager.on_reset_flushed()

    def find(self, *numbers: int, within: float = LONG) -> list[int] | None:
        """Look a prefix up as the scheduler does; what its blocks are full of.

        A block that is not full of one byte is -1. None when the request would still
        be waiting after ``within`` seconds.
        """
        context = self.request()
        end = time.monotonic() + within
        while time.monotonic() < end:
            rows = self.answered(context, numbers)
            self.step()
            if rows is not None:
                return [int(row[0]) if (row == row[0]).all() else -1 for row in rows]
        return None

    def answered(self, context: Any, numbers: Iterable[int]) -> list[Any] | None:
        """Look a prefix up once, and end the request unless it has to wait: its blocks."""
        nowhere, wait = lookup_results()
        hits, later = [], False
        for number in numbers:
            result = self.manager.lookup(self.key(number), context)
            later |= result in wait
            if result is nowhere:
                break
            hits.append(self.key(number))
        self.manager.touch([self.key(number) for number in numbers], context)
        if later:
            return None
        blocks = rows_of(self.manager.prepare_load(hits, context))
        memory = np.asarray(self.primary.get_kv_memoryview())
        rows = [memory[int(block)].copy() for block in blocks]
        self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return rows
