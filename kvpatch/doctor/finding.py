"""What a check of this machine found: a level, what it is and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum


class Level(str, Enum):
    """How bad a finding is; a problem makes ``kvpatch doctor`` end 1."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        topic: the part of the report it belongs to.
        level: how bad it is.
        what: what was found, as a sentence without its full stop.
        remedy: what to do about it, as an imperative; empty when there is nothing.
    """

    topic: str
    level: Level
    what: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return it for JSON."""
        return asdict(self) | {"level": self.level.value}
