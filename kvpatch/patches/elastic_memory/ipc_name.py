"""One kvcached name per engine, for its page limit and its workers' sockets.

kvcached derives it from the process group, which two engines started by one script share. kvpatch
sets a unique name for every program that an operator starts.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpatch import claims
from kvpatch.environ import KVCACHED_IPC_NAME, OUR_IPC_NAME
from kvpatch.patches.elastic_memory import pool
from kvpatch.process import started_by_multiprocessing
from kvpatch.refusal import Refusal
from kvpatch.upstream import kvcached_api

NAME = KVCACHED_IPC_NAME.name
_GIVEN = OUR_IPC_NAME.name  # the name that kvpatch set; an operator's own name differs from it
KIND = "pool"  # of its claim
_QUEUES = f"{claims.BASE}/"


def give_name() -> None:
    """Name this instance for kvcached, before kvcached is imported.

    An operator's name is kept. vLLM's own processes keep the name that they inherit; any
    other process that inherits a name of kvpatch is a separate instance, started by a
    script that imported vLLM too.
    """
    given = os.environ.get(NAME)
    if given and given != os.environ.get(_GIVEN):
        return
    if given and started_by_multiprocessing():
        return
    os.environ[NAME] = os.environ[_GIVEN] = f"kvcached_vLLM_{os.getpid()}_{os.urandom(4).hex()}"


def rename(derive: Callable[[str], str]) -> None:
    """Name the engine of this process, and the workers that it will start, after its server."""
    name = derive(kvcached_api.name())
    kvcached_api.rename(name)
    os.environ[NAME] = os.environ[_GIVEN] = name  # also where an operator named the server


def around_engine_start(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Claim an ``EngineCore``'s name and make its pool; refused where another engine has it."""
    from kvcached.utils import DEFAULT_IPC_NAME

    gc.collect()  # releases the name of an engine that was dropped before
    try:
        claim = claims.hold(instance, KIND, DEFAULT_IPC_NAME)
    except claims.Taken as taken:
        raise Refusal(
            f"{taken.holder} uses the kvcached name {DEFAULT_IPC_NAME}",
            "the two would share a page limit and unmap each other's pages",
            ("shut that one down first, or " if taken.is_here else "")
            + f"start every engine as a separate program, and give each its own {NAME} if you set "
            "one",
            code="KVP414",
        ) from taken
    try:
        pool.make(DEFAULT_IPC_NAME)
        if os.environ.get(_GIVEN) == DEFAULT_IPC_NAME:  # nobody starts an engine of this name again
            claim.cover(DEFAULT_IPC_NAME)
        return _with_queues(claim, wrapped, args, kwargs)
    except BaseException:
        # The error may be kept, and the engine with it, while another one is started.
        claims.release(instance)
        raise


def _with_queues(claim: claims.Claim, start: Any, args: Any, kwargs: Any) -> Any:
    """Start an engine; let vLLM's queues between it and its workers go with the claim.

    Nobody removes them once a worker is killed. A process that is not vLLM's own may have shared
    memory of Python under names like theirs.
    """
    if not started_by_multiprocessing():
        return start(*args, **kwargs)
    before = _queues()
    result = start(*args, **kwargs)
    claim.cover(*_queues() - before)
    return result


def _queues() -> set[str]:
    """Return the names of Python's shared memory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.rpartition(" ")[2] for line in lines}
    return {path.removeprefix(_QUEUES) for path in paths if path.startswith(f"{_QUEUES}psm_")}


def after_engine_shutdown(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Release the names of an ``EngineCore`` once it has shut down."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        claims.release(instance)
