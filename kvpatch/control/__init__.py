"""Telling a running engine to give its memory away and to take it back.

    from kvpatch import control

    for engine in control.engines():
        print(engine.name, engine.phase)
    answer = control.find("chat").suspend(timeout=60)

The engine does the work, on its own thread; who asked may go away without stopping it. Needs no
vLLM in the process that asks.

protocol  where an engine listens, and what is said there
client    asking one engine, and every engine of this user
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpatch.control.client import Answer, Engine, Refused, Unanswered, engines, find

__all__ = ["Answer", "Engine", "Refused", "Unanswered", "engines", "find"]


def __getattr__(name: str) -> Any:  # an engine answers, and does not need what asks
    if name in __all__:
        from kvpatch.control import client

        return getattr(client, name)
    raise AttributeError(f"module 'kvpatch.control' has no attribute {name!r}")
