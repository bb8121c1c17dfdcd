"""The result of a check of this machine: a level, the finding and a remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum


class Level(str, Enum):
    """The severity of a finding; with a problem ``kvpatch doctor`` exits with status 1."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of a report."""

    topic: str
    level: Level
    what: str  # a sentence without a full stop
    remedy: str = ""  # an imperative; empty if there is nothing to do
    code: str = ""  # of the refusal that vLLM would end with; empty if it is none

    def as_dict(self) -> dict[str, str]:
        """Return it for JSON."""
        return asdict(self) | {"level": self.level.value}


class Topic(str):
    """A part of the report, which makes its findings."""

    def ok(self, what: str) -> Finding:
        """Return what is as it should be."""
        return Finding(self, Level.OK, what)

    def note(self, what: str, remedy: str = "") -> Finding:
        """Return what an operator may want to know."""
        return Finding(self, Level.NOTE, what, remedy)

    def warning(self, what: str, remedy: str = "") -> Finding:
        """Return what degrades vLLM, or may."""
        return Finding(self, Level.WARNING, what, remedy)

    def problem(self, what: str, remedy: str = "", code: str = "") -> Finding:
        """Return what refuses vLLM, or lets it fail."""
        return Finding(self, Level.PROBLEM, what, remedy, code)
