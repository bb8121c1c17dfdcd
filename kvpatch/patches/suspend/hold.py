"""Keeping a scheduler from running requests, beneath vLLM's own pause."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Hold:
    """What kvpatch and vLLM's own ``pause`` each want of a scheduler; kept on the scheduler.

    The scheduler is in the stricter one of the two states: neither ends what the other one began.
    """

    ours: Any = None  # the ``PauseState`` of a suspension; None without one
    vllms: Any = None  # what was asked for through vLLM
    stepped_for: set[str] = field(default_factory=set)  # although no request can run

    def step_for(self, what: str, wanted: bool) -> None:
        """Let the engine be stepped for something, or no longer."""
        if wanted:
            self.stepped_for.add(what)
        else:
            self.stepped_for.discard(what)

    def set(self, scheduler: Any, wanted: Any) -> None:
        """Pause a scheduler for a suspension, or with None no longer."""
        self.ours = wanted
        scheduler.set_pause_state(self.vllms or type(scheduler.pause_state).UNPAUSED)

    def runs_out(self, scheduler: Any) -> bool:
        """Whether vLLM itself has nothing left to do, but for requests that it keeps waiting."""
        stepped_for, self.stepped_for = self.stepped_for, set()
        try:
            return not scheduler.has_requests()
        finally:
            self.stepped_for = stepped_for
