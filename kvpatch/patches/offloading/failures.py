"""Copies of OffloadingConnector that fail: the engine ends with one sentence.

vLLM's worker submits copies and asks for their events in these calls. A copy that fails is an
error of CUDA, or an assertion where vLLM logs that error and goes on without the copy. In every
release it ends the engine, because vLLM's workers never report a copy as failed: CUDA's errors of
a copy stay, so that nothing is left that could compute the blocks again.
"""

from __future__ import annotations

from typing import Any

from kvpatch.refusal import Halted

REMEDY = (
    "start the engine again, and look for errors of the device in the kernel's log; without "
    "a KV connector nothing is copied"
)


def around_transfers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Name a failed copy as the reason why the engine ends, by Halted."""
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        if says_itself(error):
            raise
        raise ended(f"the copies failed with {named(error)}") from error


def ended(why: str) -> Halted:
    """Return the sentence for a failed copy after which an engine cannot go on."""
    return Halted(
        "blocks could not be copied between the device and the CPU tier",
        why,
        REMEDY,
        code="KVP422",
    )


def says_itself(error: Exception) -> bool:
    """Whether an error is kvpatch's own: a refusal, or what debug mode has found."""
    return type(error).__module__.startswith("kvpatch.")


def named(error: BaseException) -> str:
    """Return an error as it is quoted in the sentence; an assertion of vLLM has no text."""
    kind, text = type(error).__name__, str(error)
    return f"{kind}: {text}" if text else kind
