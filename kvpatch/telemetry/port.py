"""The port of a server, as seen from outside: what it listens on."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

_DEFAULT = 8000  # of vllm serve


def of(pid: int) -> int | None:
    """Return the port on which the server ``pid`` answers requests, not its engines, or None."""
    try:
        process = psutil.Process(pid)
        # net_connections is psutil 6's name.
        connections = getattr(process, "net_connections", None) or process.connections
        listening = {
            one.laddr.port for one in connections("tcp") if one.status == psutil.CONN_LISTEN
        }
        return among(listening, process.cmdline())
    except (psutil.Error, OSError):
        return None


def among(listening: set[int], words: Sequence[str]) -> int | None:
    """Return which of a server's listening ports is the one of its command line."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == "--port":
            text = value if equals else following
            if text.isdecimal() and int(text) in listening:
                return int(text)
    if len(listening) == 1:
        return next(iter(listening))
    return _DEFAULT if _DEFAULT in listening else None
