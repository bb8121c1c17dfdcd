"""The sockets through which an engine makes its workers map and unmap pages.

kvcached sends pickled messages over them, so that whoever answers or connects runs code as the
engine's user. Their folder in /tmp has a name that others can guess if an operator chose it.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

from kvpatch import private
from kvpatch.environ import KVCACHED_IPC_NAME
from kvpatch.patch import argument
from kvpatch.refusal import Refusal

_PEER = struct.Struct("3i")  # pid, uid, gid; see SO_PEERCRED in unix(7)


def around_listener(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Make the folder of a worker's socket before the socket, and close both to other users.

    Engines that share /tmp but not /dev/shm do not see each other's claim of the name, and would
    map each other's pages: refused where another engine's worker listens.
    """
    from kvcached import tp_ipc_util

    rank = argument(args, kwargs, 0, "rank")
    pp_rank = argument(args, kwargs, 1, "pp_rank")
    own = tp_ipc_util._listeners.get((rank, pp_rank))
    if own is not None and own.stop():
        # With the last listener goes the folder, which kvcached would make open to others.
        del tp_ipc_util._listeners[rank, pp_rank]
    try:
        private.make_folder(Path(tp_ipc_util.SOCKET_DIR))
    except private.Unsafe as error:
        raise _refusal(error) from error
    path = tp_ipc_util.get_worker_socket_path(rank, pp_rank)
    if own is None and _is_served(path):
        raise Refusal(
            f"a worker of another engine listens at {path}",
            "two engines that use one kvcached name and share /tmp map each other's pages",
            f"set another {KVCACHED_IPC_NAME}",
            code="KVP414",
        )
    result = wrapped(*args, **kwargs)
    # Nobody else can reach it meanwhile, and a umask would hold for every thread.
    Path(path).chmod(0o600)
    return result


def _is_served(path: str) -> bool:
    """Whether a process listens at a socket; that of a process that is gone refuses."""
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(path) == 0


def around_path(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> str:
    """Check before every use that nobody else can enter the folder of a worker's socket."""
    path = str(wrapped(*args, **kwargs))
    from kvcached import tp_ipc_util

    private.check_folder(Path(tp_ipc_util.SOCKET_DIR))
    return path


def around_receive(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Read a message of this user's processes only; PermissionError for another's."""
    connection = argument(args, kwargs, 0, "sock")
    sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(sent)
    if uid != os.geteuid():
        raise PermissionError(f"a process of {private.user(uid)} connected to a worker's socket")
    return wrapped(*args, **kwargs)


def _refusal(error: private.Unsafe) -> Refusal:
    return error.refusal(
        "whoever answers in it instead of kvcached's workers runs code as this user",
        f"set another {KVCACHED_IPC_NAME}",
    )
