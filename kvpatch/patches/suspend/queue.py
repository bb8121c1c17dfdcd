"""vLLM's queue of client requests, through which everything reaches an engine's own thread."""

from __future__ import annotations

from typing import Any


def hand_over(engine: Any, what: Any) -> None:
    """Let something reach the engine's thread, also while that waits for its clients.

    vLLM ignores what comes with a WAKEUP; see ``hooks.around_client_request``.
    """
    from vllm.v1.engine import EngineCoreRequestType

    engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, what))
