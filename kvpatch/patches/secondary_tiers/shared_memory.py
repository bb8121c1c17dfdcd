"""The primary tier's shared memory belongs to one engine."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from kvpatch import claims, private
from kvpatch.patch import argument
from kvpatch.refusal import Refusal
from kvpatch.upstream import connectors
from kvpatch.upstream.vllm_api import region_path

# Of the workers in this process, by the id in its name: device and inode of the file.
_files: dict[str, tuple[int, int]] = {}
# What every worker of the engine that starts here has, once the KV cache is there.
_of_workers: list[dict[str, tuple[int, int]]] = []

_OTHERS = "another user could read and change the KV of this engine's requests"
_OTHER_ID = "give this engine another engine_id in kv_transfer_config"


def around_engine_core(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse an engine whose primary tier would be another engine's memory.

    vLLM opens existing memory of an ``engine_id``, because workers share it so, once the model is
    loaded: an engine that started meanwhile is not seen by the file alone.
    """
    config = argument(args, kwargs, 0, "vllm_config")
    # A stand-in for a configuration may have none; vLLM has its own words for that.
    transfer: Any = getattr(config, "kv_transfer_config", None)
    if not connectors.offloading(transfer):
        return wrapped(*args, **kwargs)
    gc.collect()  # releases the engine_id of an engine that was dropped before
    path = region_path(transfer.engine_id)
    try:
        claim = claims.hold(instance, "tier", transfer.engine_id)
    except claims.Taken as taken:
        raise Refusal(
            f"{taken.holder} has the engine_id {transfer.engine_id}",
            f"the two would share {path}, and load each other's blocks",
            "give each engine its own engine_id in kv_transfer_config",
            code="KVP413",
        ) from taken
    try:
        if _check_path(path):
            raise Refusal(
                f"the CPU tier's shared memory {path} already exists",
                f"another engine with engine_id {transfer.engine_id} is running or was killed, and "
                "two engines that share this memory would load each other's blocks",
                "give each engine its own engine_id in kv_transfer_config, or remove the "
                "file when no engine uses it",
                code="KVP413",
            )
        claim.cover(path.name)  # vLLM leaves it if the worker that made it is killed
        return wrapped(*args, **kwargs)
    except BaseException:
        claims.release(instance)
        raise


def files(worker: Any) -> dict[str, tuple[int, int]]:
    """Return which files the workers of this process have mapped; runs in the worker by RPC."""
    return dict(_files)


def expect(of_workers: list[dict[str, tuple[int, int]]]) -> None:
    """Let the scheduler map the file that is in the ``files`` of all workers, and no other."""
    _of_workers[:] = of_workers


def around_region(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse shared memory that another user made, or that not all of the engine share.

    vLLM joins any file of its name, waits for one of the wrong size, and makes one that is missing.
    Up to 0.25 the id is called ``instance_id``. The scheduler, from which tiers read, has no rank.
    """
    name = (
        kwargs["instance_id"] if "instance_id" in kwargs else argument(args, kwargs, 0, "engine_id")
    )
    of_worker = argument(args, kwargs, 2, "rank") is not None
    path = region_path(name)
    if not _check_path(path) and not of_worker:
        raise _lost(path)  # and no second file, as large as the first
    try:
        result = wrapped(*args, **kwargs)
    except FileNotFoundError as error:  # of a host pool, or removed between two calls of vLLM
        raise _lost(path) from error
    except OSError:
        _check_path(path)  # made since, and of a wrong size or not to be opened
        raise
    status = os.fstat(instance.fd)
    # From 0.29 on the file has no name any more once all workers have opened it.
    _check(path, status)
    file = status.st_dev, status.st_ino
    if of_worker:
        _files[name] = file
    elif any(one.get(name) != file for one in _of_workers):
        instance.cleanup()
        raise _lost(path)
    return result


def _lost(path: Path) -> Refusal:
    return Refusal(
        f"the CPU tier's shared memory {path} was removed or replaced while the engine started",
        "its processes would have different memory under one name, and a secondary tier would "
        "store other bytes than those of the blocks",
        f"keep what removes files from {path.parent} off this one (a cleaner, or a logout of its "
        "user with RemoveIPC=yes in logind.conf), and start the engine again",
        code="KVP427",
    )


def _check_path(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    _check(path, status)
    return True


def _check(path: Path, status: os.stat_result) -> None:
    try:
        private.check_file(path, status)
    except private.Unsafe as error:
        raise error.refusal(_OTHERS, _OTHER_ID) from error
