"""One kvcached name per engine, for its page limit and its workers' sockets.

kvcached derives the name from the process group, so that two engines started by one script
share it: each reads the other's page limit, and unmaps pages in the other's workers. kvpatch
sets a unique name for every program that an operator starts, and an engine does not start
with a name that another engine uses.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
from typing import Any

from kvpatch import state
from kvpatch.environ import KVCACHED_IPC_NAME, OUR_IPC_NAME
from kvpatch.refusal import Refusal

NAME = KVCACHED_IPC_NAME.name
_GIVEN = OUR_IPC_NAME.name  # the name that kvpatch set; an operator's own name differs from it
CLAIM = "@kvpatch-engine-"  # an abstract socket, as /proc/net/unix shows it


def give_name() -> None:
    """Name this instance for kvcached, before kvcached is imported.

    An operator's name is kept. vLLM's own processes keep the name that they inherit; any
    other process that inherits a name of kvpatch is a separate instance, started by a
    script that imported vLLM too.
    """
    given = os.environ.get(NAME)
    if given and given != os.environ.get(_GIVEN):
        return
    if given and _started_by_multiprocessing():
        return
    os.environ[NAME] = os.environ[_GIVEN] = f"kvcached_vLLM_{os.getpid()}_{os.urandom(4).hex()}"


def _started_by_multiprocessing() -> bool:
    # A spawned child has no parent_process() yet while it unpickles its target.
    current = multiprocessing.current_process()
    return multiprocessing.parent_process() is not None or getattr(current, "_inheriting", False)


class Claim:
    """An engine's hold on its name, kept on its ``EngineCore``."""

    def __init__(self, claimed: socket.socket) -> None:
        self.socket = claimed


def claim() -> socket.socket:
    """Make the caller the only engine with this name, until the socket is closed.

    The kernel removes an abstract socket when its process exits, for whatever reason.

    Raises:
        Refusal: another engine, in this process or another one, has this name.
    """
    from kvcached.utils import DEFAULT_IPC_NAME

    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claimed.bind(CLAIM.replace("@", "\0") + DEFAULT_IPC_NAME)
    except OSError as error:
        claimed.close()
        raise Refusal(
            f"another engine uses the kvcached name {DEFAULT_IPC_NAME}",
            "the two would share a page limit and unmap each other's pages",
            f"start every engine as a separate program, and give each its own {NAME} "
            "if you set one",
            code="KVP414",
        ) from error
    return claimed


def around_engine_start(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Claim the name for an ``EngineCore`` before it maps anything."""
    gc.collect()  # releases the name of an engine that was dropped before
    state.attach(instance, Claim(claim()))
    return wrapped(*args, **kwargs)


def after_engine_shutdown(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Release the name of an ``EngineCore`` once it has shut down."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        held = state.find(instance, Claim)
        if held is not None:
            held.socket.close()
