"""What goes into a plan and what comes out of it.

Sizes are bytes of one device; of an engine with several ranks, bytes of each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Terms:
    """What an operator wants of an engine."""

    floor: int = 0  # it always may map so much
    ceiling: int | None = None  # it never may map more; None for what it started with
    priority: float = 1.0  # how much it counts when there is not enough for all
    # Whether others may have a part of what one of its longest requests needs, while none of its
    # requests waits; None if it stores what it gives.
    lends: bool | None = None


@dataclass(frozen=True)
class Engine:
    """An engine as it was seen; of its sizes in bytes, ``most`` is what it started with."""

    name: str
    limit: int  # that it may map, or may again when it is resumed
    mapped: int
    most: int
    least: int = 0  # one request of the longest length; below it requests wait for ever
    needs: int = 0  # for the requests that it has, those that wait included
    running: int = 0
    waiting: int = 0
    found: float | None = None  # bytes that prompts found since its start; None if unknown
    answers: bool = True  # whether it can be told another limit now
    suspended: bool = False  # nothing is mapped; what it may map again is lent if it is less
    born: int = 0  # different for another engine of the same name, as its start is
    page: int = 0  # to which its limits are rounded; 0 for that of the settings
    lends: bool = False  # stores what it gives, and takes back one request's if alone

    @property
    def held(self) -> int:
        """Bytes that nobody else can count on."""
        return max(self.limit, self.mapped)

    def one_request(self, page: int) -> int:
        """Return the bytes below which a request may wait for ever, in whole pages."""
        return min(rounded_up(self.least, page), self.most)


@dataclass(frozen=True)
class Settings:
    """How memory is moved."""

    page: int = 2 << 20  # to which limits are rounded where an engine tells no page
    memory_of: float = 300.0  # seconds after which what an engine found counts half
    least_move: float = 0.05  # part of a limit below which a move is not worth its copies
    learn: float = 30.0  # seconds that an engine is looked at before it gets more for prefixes
    rest: float = 10.0  # seconds between moves to and from an engine without waiting requests
    full: float = 0.9  # part of its limit that is mapped before it gets more for prefixes
    spare: float = 0.25  # part of the need of requests, added for the tokens that they make
    peak_of: float = 10.0  # seconds after which a past need counts half: it may return
    lent: float = 1.0  # part of what a longest request needs, but a page, where told to lend


@dataclass(frozen=True)
class Past:
    """What is remembered of an engine; times are in seconds of any clock."""

    born: int  # of which engine of the name
    seen: float
    found: float | None = None  # its counter when it was last seen
    rate: float = 0.0  # bytes per second that it found; the older, the less they count
    peak: float = 0.0  # the most bytes that its requests needed; the older, the less
    since: float = -math.inf  # when it was first seen
    raised: float = -math.inf  # when its limit last went up, and down
    lowered: float = -math.inf


@dataclass(frozen=True)
class Move:
    """Another limit for an engine, in bytes, and why, as the end of a sentence."""

    name: str
    before: int
    limit: int
    why: str

    @property
    def raises(self) -> bool:
        """Whether the engine gets memory."""
        return self.limit > self.before


@dataclass(frozen=True)
class Plan:
    """What is to be done now."""

    moves: tuple[Move, ...]  # who gives comes before who gets
    shares: Mapping[str, int]  # what each engine would have if moving were free
    past: Mapping[str, Past]  # to be given back with the next look
    notes: tuple[str, ...] = field(default=())  # sentences on what is not as wanted

    def limit(self, one: Engine) -> int:
        """Return the limit that an engine is to have."""
        return next((move.limit for move in self.moves if move.name == one.name), one.limit)


def rounded_up(size: int, page: int) -> int:
    """Return a size in whole pages."""
    return -(-size // page) * page
