"""What ``balance`` says about what it does: a line for a person, or an object for a program."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass
from typing import Any

from kvpatch.balance.records import Move
from kvpatch.control import Refused, Unanswered
from kvpatch.sizes import readable
from kvpatch.telemetry.printable import printable


@dataclass(frozen=True)
class Event:
    """One thing that happened."""

    at: float  # seconds since the epoch
    name: str  # the engine; empty for something about all of them
    # ``limit``, ``late``, ``refused``, ``appeared``, ``ended``, ``silent``, ``answers``, ``left``,
    # ``note``.
    what: str
    why: str = ""  # a reason, or the whole sentence of a note
    before: int = 0  # of a limit, in bytes
    limit: int = 0
    dry: bool = False  # it was not done, because it was a dry run

    @classmethod
    def of(cls, at: float, move: Move, dry: bool, why_not: Refused | None = None) -> Event:
        """Return the event of a limit that was set, or refused, or to which an engine may come."""
        what = "late" if isinstance(why_not, Unanswered) else "refused" if why_not else "limit"
        why = move.why if why_not is None else str(why_not)
        return cls(at, move.name, what, why, move.before, move.limit, dry)

    @property
    def line(self) -> str:
        """It, for a person."""
        clock = datetime.datetime.fromtimestamp(self.at).strftime("%H:%M:%S")
        return printable(f"{clock} {self._sentence()}")

    def _sentence(self) -> str:
        before, limit = readable(self.before), readable(self.limit)
        said = {
            "limit": f"{'would be ' * self.dry}{before} -> {limit}, because {self.why}",
            "late": f"{before} -> {limit} is not confirmed: {self.why}",
            "refused": f"stays at {before}, and not {limit}: {self.why}",
            "appeared": f"is here, with {limit} at most",
            "ended": "has ended",
            "silent": f"keeps {limit}: {self.why}",
            "left": f"is left with {limit} at most" + (f"; {self.why}" if self.why else ""),
            "answers": "answers again",
        }.get(self.what, self.why)
        return f"{self.name}: {said}" if self.name else said

    @property
    def json(self) -> str:
        """It, for a program, in one line."""
        said: dict[str, Any] = {name: value for name, value in asdict(self).items() if value != ""}
        if self.what not in ("limit", "late", "refused", "appeared", "silent", "left"):
            del said["before"], said["limit"]
        return json.dumps(said)
