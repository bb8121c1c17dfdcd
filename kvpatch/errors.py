"""The one way kvpatch says no."""

from __future__ import annotations


class Refusal(RuntimeError):
    """Stops vLLM at start-up with one sentence: what, why, what to do.

    Args:
        what: the combination or setting that cannot be run.
        why: the reason it is not known to be right.
        remedy: what the operator does about it, as an imperative.
    """

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(f"kvpatch refuses to start vLLM: {what}, because {why}; {remedy}.")
        self.what = what
        self.why = why
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[Refusal], tuple[str, str, str]]:
        """Survive the pickling between an engine's processes."""
        return (Refusal, (self.what, self.why, self.remedy))
