"""How a refusal reaches the operator: one line on stderr, whichever process refused.

An engine or worker that refuses dies with its sentence deep in the log, and the process
the operator started ends with "Engine core initialization failed". The first sentence is
left in a file that only exists after a refusal, and is printed last.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from kvpatch.environ import REFUSAL_FILE
from kvpatch.refusal import Refusal, RefusedImport
from kvpatch.telemetry import refusals

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
Wrapper = Callable[..., Any]

_vllm_missing = False
_hooked = False


def vllm_is_missing() -> None:
    """Remember that vllm was not found.

    The import raises Python's own error, which many programs expect and catch; only
    when nobody does is the sentence printed in its place.
    """
    global _vllm_missing
    _vllm_missing = True
    in_one_line()


def in_one_line() -> None:
    """Print a refusal that nobody caught as one line without its traceback, from now on."""
    global _hooked
    if not _hooked:
        _hooked = True
        _listen()
        sys.excepthook = _excepthook(sys.excepthook)


def report(refusal: Refusal) -> None:
    """Leave a refusal for ``kvpatch status`` and for the process that the operator started."""
    sentence = str(refusal)
    refusals.remember(sentence)
    if _is_first():
        return  # its own excepthook prints it
    path = Path(os.environ.get(REFUSAL_FILE.name, ""))
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    except OSError:
        return  # an earlier one exists already, or the log must do
    with os.fdopen(file, "w") as stream:
        stream.write(sentence)


def guard(wrapper: Wrapper) -> Wrapper:
    """Return ``wrapper`` with a report of the refusals it raises: vLLM's processes log and drop
    them.
    """

    def reporting(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapper(wrapped, instance, args, kwargs)
        except Refusal as refusal:
            report(refusal)
            raise

    return reporting


def forget_submodules() -> None:
    """Make every later ``import vllm.anything`` begin at ``vllm``, which is refused."""
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        del sys.modules[name]


def _listen() -> None:
    """Take part: as the first process, or as one that vLLM started from it."""
    if REFUSAL_FILE.name not in os.environ:
        folder = os.environ.get("TMPDIR") or "/tmp"
        name = f"{folder}/kvpatch-refusal-{os.getpid()}-{os.urandom(8).hex()}"
        os.environ[REFUSAL_FILE.name] = name
        atexit.register(_clean_up)


def _is_first() -> bool:
    return f"/kvpatch-refusal-{os.getpid()}-" in os.environ.get(REFUSAL_FILE.name, "")


def _clean_up() -> None:
    if _is_first():  # and not a forked child that inherited this
        _take()


def _take() -> str | None:
    """Return the sentence another process left, if there is one, and remove it."""
    path = Path(os.environ.get(REFUSAL_FILE.name, ""))
    try:
        sentence = path.read_text()
        path.unlink()
    except OSError:
        return None
    return sentence


def _excepthook(previous: ExceptHook) -> ExceptHook:
    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        refusal = error if isinstance(error, Refusal) else _of_missing_vllm(error)
        if refusal is None:
            previous(kind, error, traceback)
        # After another error, the sentence of the process that caused it.
        sentence = _take() if refusal is None else str(refusal)
        if sentence is not None:
            sys.stderr.write(f"{sentence}\n")

    return hook


def _of_missing_vllm(error: BaseException) -> Refusal | None:
    if not (_vllm_missing and isinstance(error, ModuleNotFoundError) and error.name == "vllm"):
        return None
    from kvpatch.supported import validated  # needs packaging, which may be what is broken
    from kvpatch.versions import in_words

    return RefusedImport(
        "vllm is not installed in this environment",
        f"kvpatch is on and patches nothing but vllm {in_words(validated())}",
        "install it with pip, or set KVPATCH=0",
        code="KVP112",
    )
