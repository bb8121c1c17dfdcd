"""What kvpatch is in this process, and the one line that says so."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

from kvpatch import layouts
from kvpatch.errors import Refusal
from kvpatch.patch import Outcome

# A child of vLLM's logger: vLLM's logging configuration drops INFO of any other name.
log = logging.getLogger("vllm.kvpatch")


@dataclass
class Record:
    """The facts of one process."""

    vllm: str = ""
    kvcached: str = ""
    features: dict[str, Outcome] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    storages: set[int] = field(default_factory=set)
    layout: str = ""
    elastic: bool | None = None
    said_by: int = 0

    def line(self) -> str:
        """The status line: who runs what on which memory."""
        import kvpatch

        features = ", ".join(f"{name} {outcome.value}" for name, outcome in self.features.items())
        elastic = {True: "yes", False: "no", None: "not in this process"}[self.elastic]
        return (
            f"kvpatch {kvpatch.__version__}: pid {os.getpid()}, "
            f"role {' and '.join(self.roles)}, {self.vllm}, kvcached {self.kvcached}, "
            f"features: {features}; {self.layout}{'; ' if self.layout else ''}"
            f"KV on elastic memory: {elastic}"
        )

    def say(self) -> None:
        """Log the line once per process; a forked child says its own."""
        if self.said_by != os.getpid():
            self.said_by = os.getpid()
            log.info("%s", self.line())
            from kvpatch.observing import publish

            publish.process(self)


record = Record()


def said_here() -> bool:
    """Whether this very process, and not the one it was forked from, has said its line."""
    return record.said_by == os.getpid()


def on_frontend_config() -> None:
    """Say the line of a process that only talks to an engine in another one."""
    from vllm import envs

    in_engine = said_here() and "frontend" not in record.roles
    if envs.VLLM_ENABLE_V1_MULTIPROCESSING and not in_engine:
        record.roles = ["frontend"]
        record.say()


def around_engine_core(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse an engine whose block pool is not elastic; say its line.

    Wraps ``EngineCore.__init__``. With one worker in the same process the worker's
    part of the start-up runs inside this call.
    """
    record.roles, record.elastic = ["engine-core"], None
    wrapped(*args, **kwargs)
    from vllm.v1.core import block_pool

    pool = instance.scheduler.kv_cache_manager.block_pool
    if not isinstance(pool, block_pool.ElasticBlockPool):
        raise Refusal(
            "the scheduler's block pool is vLLM's own, not kvcached's",
            "blocks would be handed out for memory that kvcached never mapped",
            "report this with the log above, or set KVPATCH=0",
            code="KVP401",
        )
    record.elastic = True
    record.layout = layouts.said(instance.vllm_config)
    record.say()


def around_kv_cache_tensors(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a worker whose KV caches are not kvcached's; say its line.

    Wraps ``GPUModelRunner.initialize_kv_cache_tensors``. kvcached marks each tensor
    it hands out with the view of its blocks.
    """
    kv_caches = wrapped(*args, **kwargs)
    _say_worker({name: block_view(cache) is not None for name, cache in kv_caches.items()})
    return kv_caches


def remember_allocation(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Remember the storage of the KV caches that kvcached allocates.

    Wraps kvcached's ``allocate_kv_cache``; from vLLM 0.29 on the caches are vLLM's own
    views of kvcached's memory.
    """
    kv_caches = wrapped(*args, **kwargs)
    record.storages = {_storage(cache) for cache in kv_caches.values()}
    return kv_caches


def around_initialize_kv_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a worker whose KV caches are not kvcached's; say its line.

    Wraps ``GPUModelRunner.initialize_kv_cache(kv_cache_config, is_profiling)`` of both
    runners. The KV cache of a profile is vLLM's own, and thrown away.
    """
    result = wrapped(*args, **kwargs)
    if not kwargs.get("is_profiling", args[1] if len(args) > 1 else False):
        _say_worker(
            {f"layer {index}": on_kvcached(cache) for index, cache in enumerate(instance.kv_caches)}
        )
    return result


def on_kvcached(cache: Any) -> bool:
    """Whether a KV cache lies in the memory that kvcached allocated last (vLLM >= 0.29)."""
    return _storage(cache) in record.storages


def _storage(cache: Any) -> int:
    first = cache[0] if isinstance(cache, list | tuple) else cache
    return int(first.untyped_storage().data_ptr())


def _say_worker(inside: dict[str, bool]) -> None:
    """Say the line of a worker, given which of its KV caches are kvcached's.

    Raises:
        Refusal: one of them is not.
    """
    outside = [name for name, yes in inside.items() if not yes]
    if outside:
        raise Refusal(
            f"the KV cache of {outside[0]} was allocated outside kvcached's memory",
            "it would stay allocated while kvcached maps a second, unused pool",
            "report this with your command line, or set KVPATCH=0",
            code="KVP402",
        )
    record.elastic = bool(inside)
    if "engine-core" in record.roles:
        record.roles = ["engine-core", "worker"]
    else:
        record.roles = ["worker"]
        record.say()


def block_view(cache: Any) -> Any:
    """Return kvcached's block view of one layer's KV cache, or None.

    A uint8 tensor of shape ``[blocks, bytes]``, or ``[blocks, 2, bytes]`` where K and
    V live apart. Source: ``_set_block_copy_view`` in kvcached's interfaces.
    """
    first = cache[0] if isinstance(cache, list | tuple) else cache
    return getattr(first, "_kvcached_block_copy_view", None)
