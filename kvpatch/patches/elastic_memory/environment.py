"""The environment of an engine's process, which kvcached's threads read for each line they log."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def around_engine_core(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let vLLM set its variables before kvcached's threads start.

    At the end of the call it reads all of them, and one sets itself. A new variable makes the C
    library move the environment, and a thread that is just reading it (getenv) ends the process.
    """
    from vllm import envs

    for name in envs.environment_variables:
        with suppress(Exception):  # vLLM's to report, where it needs it
            getattr(envs, name)
    return wrapped(*args, **kwargs)
