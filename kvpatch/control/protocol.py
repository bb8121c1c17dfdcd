"""Where an engine listens for its user, and the lines that are exchanged there.

A connection carries one question. Each line is a JSON object:

    the question   {"verb": "suspend", "timeout": 60, ...}
    progress       {"phase": "storing", "stored": 120, ...}, as often as something changed
    the answer     the same with "done": true, and with "error": a sentence, if it was refused

A folder that only its user can enter, and the kernel's word on who is at the other end, keep all
others out: no line is read before both are checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpatch import claims, private

LONGEST_NAME = 64  # characters of a name that kvcached keeps
VERBS = ("describe", "suspend", "resume", "limit", "demand")
LONGEST = 1 << 16  # bytes of a line
_PEER = struct.Struct("3i")  # pid, uid, gid; see SO_PEERCRED in unix(7)


def folder() -> Path:
    """Return the folder of the sockets of this user's engines."""
    return claims.BASE / f"kvpatch-control-{claims.outer_uid()}"


def path_of(name: str) -> Path:
    """Return the socket of the engine with a kvcached name, which may have any length."""
    return folder() / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.sock"


def kept(name: str) -> str:
    """Return a name as kvcached keeps that of an engine (``_sanitize_segment``).

    >>> kept("qwen2.5")
    'qwen2-5'
    """
    return "".join(one if one.isalnum() or one in "_-" else "-" for one in name)[:LONGEST_NAME]


def name_of_rank(server: str, rank: int) -> str:
    """Return the kvcached name of an engine that is one of several of a data parallel server.

    Not longer than kvcached's names are: what it cuts off tells the ranks apart. Names that are
    the same by what is left out here are one name, which is claimed once.

    Args:
        server: the kvcached name of the server.
        rank: vLLM's number of the engine in all of its server, also on other machines.
    """
    suffix = f"-dp{rank}"
    return server[: LONGEST_NAME - len(suffix)] + suffix


def is_rank_of(name: str, server: str) -> bool:
    """Return whether a kvcached name is that of an engine of a data parallel server."""
    rank = name.rpartition("-dp")[2]
    return rank.isdecimal() and name == name_of_rank(server, int(rank))


def pid_of(connection: socket.socket) -> int:
    """Return the process at the other end; 0 if it cannot be seen from here."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, gid = _PEER.unpack(found)
    return pid, uid, gid


def check_peer(connection: socket.socket) -> None:
    """Check that this user's process is at the other end.

    Raises:
        PermissionError: it is another user's.
    """
    uid = _peer(connection)[1]
    if uid != os.geteuid():
        raise PermissionError(f"a process of {private.user(uid)} is at the other end")


def send(connection: socket.socket, line: dict[str, Any]) -> None:
    """Send one line.

    Raises:
        OSError: the other end is gone.
    """
    connection.sendall(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def lines(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Iterate over the lines of the other end, until it closes.

    Raises:
        ValueError: a line is too long, or no JSON object.
        OSError: the connection failed, or timed out.
    """
    rest = b""
    while True:
        line, newline, after = rest.partition(b"\n")
        if newline:
            rest = after
            found = json.loads(line)
            if not isinstance(found, dict):
                raise ValueError("a line is no JSON object")
            yield found
            continue
        if len(rest) > LONGEST:
            raise ValueError(f"a line is longer than {LONGEST} bytes")
        more = connection.recv(LONGEST)
        if not more:
            return
        rest += more
