"""Engines on one device, in time: they take turns at computing, and somebody limits their memory.

Whoever has something to compute gets an equal part of the device's time.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count

from harness.balancing.engine import ANSWER, Engine, Request
from harness.balancing.traces import Conversation, Turn

PROMPT = 20_000.0  # tokens of prompts per second
STEP = 0.012  # seconds for one token of every answer
MORE = 0.0001  # seconds for each answer
EVERY = 1.0  # seconds between two looks of whoever limits


class Limits(ABC):
    """Who says how many bytes an engine may map."""

    def __init__(self, engines: list[Engine], size: int) -> None:
        self.engines = engines
        self.size = size
        for engine in engines:
            engine.room = lambda engine=engine: int(  # type: ignore[misc]
                self.limit(engine) // engine.bytes_of_block
            )

    @abstractmethod
    def limit(self, engine: Engine) -> int:
        """Return the bytes that an engine may map now."""

    def look(self, now: float) -> None:  # noqa: B027 - most of them do not
        """Look at the engines; called once in a second."""


class Device:
    """The simulation."""

    def __init__(self, engines: list[Engine], limits: Limits) -> None:
        self.engines = engines
        self.limits = limits
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()
        self._busy: set[str] = set()

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._events, (when, next(self._count), do))

    def run(self, seconds: float) -> None:
        """Run for some seconds of the simulation."""
        self.at(0.0, self._look)
        while self._events and self._events[0][0] <= seconds:
            self.now, _, do = heapq.heappop(self._events)
            do()

    def ask(self, engine: Engine, turn: Turn, done: Callable[[float], None]) -> None:
        """Send a request."""
        engine.queue.append(Request(turn, self.now, done))
        self._start(engine)

    def users(
        self,
        engine: Engine,
        sessions: list[Conversation],
        number: int,
        active: Callable[[int, float], float],
    ) -> None:
        """Let users work on sessions, one after the other.

        Args:
            engine: that they ask.
            sessions: which they take in order.
            number: of users.
            active: returns when a user may ask next, at a time or after it.
        """
        rest = iter(sessions)

        def begin(user: int) -> None:
            session = next(rest, None)
            if session is not None:
                turn(user, session, 0)

        def turn(user: int, session: Conversation, index: int) -> None:
            if index == len(session):
                begin(user)
                return
            pause = session[index].pause if index else 5.0 * user
            when = active(user, self.now + pause)
            self.at(
                when,
                lambda: self.ask(
                    engine, session[index], lambda now: turn(user, session, index + 1)
                ),
            )

        for user in range(number):
            begin(user)

    def _look(self) -> None:
        self.limits.look(self.now)
        for engine in self.engines:
            self._start(engine)
        self.at(self.now + EVERY, self._look)

    def _start(self, engine: Engine) -> None:
        if engine.name in self._busy or not (engine.queue or engine.running):
            return
        prompts, answers = engine.step(self.now)
        if not prompts and not answers:
            waits = [one.ready for one in engine.running if one.ready > self.now]
            if waits:
                self._busy.add(engine.name)
                self.at(min(waits), lambda: self._end(engine))
            return  # else nothing fits; the next look comes back to it
        self._busy.add(engine.name)
        own = prompts / PROMPT + ANSWER * (STEP + MORE * answers)
        self.at(self.now + own * len(self._busy), lambda: self._end(engine))

    def _end(self, engine: Engine) -> None:
        self._busy.discard(engine.name)
        engine.end(self.now)
        for one in self.engines:  # what it freed may be what another one waits for
            self._start(one)
