"""The environment of an engine's process, which kvcached's threads read for each line they log."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def around_engine_core(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let vLLM set the variables that it sets by itself before kvcached's threads start.

    vLLM reads all of its variables at the end of the call, and one of them sets itself. A new
    variable makes the C library move the environment, and a thread that is just reading it (getenv)
    ends the process.

    Wraps ``EngineCore.__init__``.
    """
    from vllm import envs

    for name in envs.environment_variables:
        with suppress(Exception):  # vLLM's to report, where it needs it
            getattr(envs, name)
    return wrapped(*args, **kwargs)
