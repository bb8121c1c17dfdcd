"""How a refusal reaches the operator: one line on stderr, whichever process refuses.

If an engine or worker refuses, its sentence is buried in the log, and the process that the
operator started ends with "Engine core initialization failed". So the first refusal is
written to a file, which exists only after a refusal, and is printed last.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from kvpatch import private
from kvpatch.environ import REFUSAL_FILE
from kvpatch.logs import log
from kvpatch.refusal import Refusal, RefusedImport
from kvpatch.telemetry import refusals

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
Wrapper = Callable[..., Any]

_vllm_missing = False
_hooked = False


def vllm_is_missing() -> None:
    """Record that vllm was not found: printed unless Python's own error is caught."""
    global _vllm_missing
    _vllm_missing = True
    in_one_line()


def in_one_line() -> None:
    """Print uncaught refusals as one line without a traceback from now on."""
    global _hooked
    if not _hooked:
        _hooked = True
        _listen()
        sys.excepthook = _excepthook(sys.excepthook)


def report(refusal: Refusal) -> None:
    """Record a refusal for ``kvpatch status`` and the operator's process; the caller raises it."""
    sentence = str(refusal)
    refusals.remember(sentence)
    if _is_first() or not refusal.final:
        return  # its own excepthook prints it; a refused call is its caller's, who goes on
    path = Path(os.environ.get(REFUSAL_FILE.name, ""))
    try:
        private.create(path, sentence.encode(errors="backslashreplace"))
    except Exception as error:  # an earlier refusal is recorded, or only the log has this one
        log.debug("kvpatch: the refusal was not left for the first process: %r", error)


def guard(wrapper: Wrapper) -> Wrapper:
    """Return ``wrapper`` with its refusals reported; vLLM's processes only log them."""

    def reporting(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapper(wrapped, instance, args, kwargs)
        except Refusal as refusal:
            report(refusal)
            raise

    return reporting


def forget_submodules() -> None:
    """Make every later import of a submodule start at ``vllm``, which is refused."""
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        del sys.modules[name]


def _listen() -> None:
    """Name the file for refusals if this is the first process; child processes inherit it."""
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
    """Return the refusal that another process recorded, if any, and remove it."""
    path = Path(os.environ.get(REFUSAL_FILE.name, ""))
    try:
        sentence = path.read_text("utf-8", errors="backslashreplace")
        path.unlink()
    except OSError:
        return None
    return sentence or None


def _excepthook(previous: ExceptHook) -> ExceptHook:
    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        refusal = error if isinstance(error, Refusal) else _of_missing_vllm(error)
        if refusal is None:
            previous(kind, error, traceback)
        # After another error, the refusal of the process that caused it.
        sentence = _take() if refusal is None else str(refusal)
        if sentence is not None:
            sys.stderr.write(f"{sentence}\n")

    return hook


def _of_missing_vllm(error: BaseException) -> Refusal | None:
    if not (_vllm_missing and isinstance(error, ModuleNotFoundError) and error.name == "vllm"):
        return None
    from kvpatch.supported import in_ranges, validated  # needs packaging, which may be broken

    return RefusedImport(
        "vllm is not installed in this environment",
        f"kvpatch is on and patches nothing but vllm {in_ranges(validated())}",
        "install it with pip, or set KVPATCH=0",
        code="KVP112",
    )
