"""How a refusal reaches the operator: one line on stderr, and it stays refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvpatch import relay
from kvpatch.errors import Refusal, RefusedImport

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_vllm_missing = False
_hooked = False


def vllm_is_missing() -> None:
    """Remember that nothing was found when vllm was asked for.

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
        relay.listen()
        sys.excepthook = _excepthook(sys.excepthook)


def _excepthook(previous: ExceptHook) -> ExceptHook:
    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        refusal = error if isinstance(error, Refusal) else _of_missing_vllm(error)
        if refusal is None:
            previous(kind, error, traceback)
        # After another error, the sentence of the process that caused it.
        sentence = relay.take() if refusal is None else str(refusal)
        if sentence is not None:
            sys.stderr.write(f"{sentence}\n")

    return hook


def _of_missing_vllm(error: BaseException) -> Refusal | None:
    if not (_vllm_missing and isinstance(error, ModuleNotFoundError) and error.name == "vllm"):
        return None
    from kvpatch import gate, registry

    return RefusedImport(
        "vllm is not installed in this environment",
        f"kvpatch is on and has nothing to patch but vllm {gate.in_words(registry.VLLM_RANGE)}",
        "install it with pip, or set KVPATCH=0",
        code="KVP103",
    )


def forget_submodules() -> None:
    """Make every later ``import vllm.anything`` begin at ``vllm``, which is refused."""
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        del sys.modules[name]
