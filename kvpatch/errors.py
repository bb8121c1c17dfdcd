"""The one way kvpatch says no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpatch.codes import UNCODED

# Told every sentence that is made; kvpatch.relay listens in vLLM's processes.
on_refusal: Callable[[str], None] | None = None


class Refusal(RuntimeError):
    """Stops vLLM at start-up with one sentence: what, why, what to do.

    A RuntimeError because kvcached passes those on where it logs and drops others.

    Args:
        what: the combination or setting that cannot be run.
        why: the reason it is not known to be right.
        remedy: what the operator does about it, as an imperative.
        code: one of ``codes.CODES``, by which the documentation finds it.
    """

    def __init__(self, what: str, why: str, remedy: str, code: str = UNCODED) -> None:
        sentence = f"kvpatch refuses to start vLLM: {what}, because {why}; {remedy}. [{code}]"
        # A quoted error may have lines; the operator's last line must hold it all.
        super().__init__(" ".join(sentence.split()))
        self.what = what
        self.why = why
        self.remedy = remedy
        self.code = code
        if on_refusal is not None:
            on_refusal(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive the pickling between an engine's processes."""
        return (type(self), (self.what, self.why, self.remedy, self.code))


class RefusedImport(Refusal, ImportError):
    """A refusal of ``import vllm`` itself.

    An ImportError, so that a program for which vllm is optional goes on without it,
    as it does where vllm is not installed.
    """

    def __init__(self, what: str, why: str, remedy: str, code: str = UNCODED) -> None:
        super().__init__(what, why, remedy, code)
        self.name = "vllm"

    @classmethod
    def of(cls, refusal: Refusal) -> RefusedImport:
        """Return ``refusal`` as the error of the import it stops."""
        return cls(refusal.what, refusal.why, refusal.remedy, refusal.code)
