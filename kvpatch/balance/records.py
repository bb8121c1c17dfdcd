"""What goes into a plan and what comes out of it.

Sizes are bytes of one device; of an engine with several ranks, bytes of each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Terms:
    """What an operator wants of an engine.

    Attributes:
        floor: it always may map so much.
        ceiling: it never may map more; None for what it started with.
        priority: how much it counts when there is not enough for all.
        lends: whether others may have a part of what one of its longest requests needs, while none
            of its requests waits; None if it stores what it gives.
    """

    floor: int = 0
    ceiling: int | None = None
    priority: float = 1.0
    lends: bool | None = None


@dataclass(frozen=True)
class Engine:
    """An engine as it was seen.

    Attributes:
        name: kvcached's, which is its own.
        born: something that is different for another engine of the same name, as its start is.
        limit: bytes that it may map, or may again when it is resumed.
        mapped: bytes that it has mapped.
        most: bytes that it started with, which it cannot exceed.
        least: bytes of one request of the longest length; below it requests wait for ever.
        needs: bytes for the requests that it has, those that wait included.
        running, waiting: those requests.
        found: bytes of KV that prompts found on the device or in the tier, since it started; None
            if it does not tell.
        answers: whether it can be told another limit now.
        suspended: whether it is suspended; it has nothing mapped and needs nothing, and what it may
            map when it is resumed can be another's once that is less.
        page: bytes of its pages, to which its limits are rounded; 0 for those of the settings.
        lends: whether it stores what it gives, and takes back what one request needs when nobody
            controls it any more.
    """

    name: str
    limit: int
    mapped: int
    most: int
    least: int = 0
    needs: int = 0
    running: int = 0
    waiting: int = 0
    found: float | None = None
    answers: bool = True
    suspended: bool = False
    born: int = 0
    page: int = 0
    lends: bool = False

    @property
    def held(self) -> int:
        """Bytes that nobody else can count on."""
        return max(self.limit, self.mapped)

    def one_request(self, page: int) -> int:
        """Return the bytes below which a request may wait for ever, in whole pages."""
        return min(rounded_up(self.least, page), self.most)


@dataclass(frozen=True)
class Settings:
    """How memory is moved.

    Attributes:
        page: bytes to which limits are rounded of engines that do not say how large a page is.
        memory_of: seconds after which what an engine found counts half.
        least_move: part of a limit below which a move is not worth its copies.
        learn: seconds for which an engine is looked at before it gets more for prefixes.
        rest: seconds for which an engine that got memory does not give it back, nor the other
            way round, unless requests wait.
        full: part of its limit that an engine has to have mapped before it gets more for prefixes.
        spare: part of the need of requests that is added to it, for the tokens that they make.
        peak_of: seconds after which a need that has passed counts half: more requests of the kind
            are likely to come.
        lent: part of what a longest request needs that an engine lends, whose operator says so; a
            page is kept of all of it.
    """

    page: int = 2 << 20
    memory_of: float = 300.0
    least_move: float = 0.05
    learn: float = 30.0
    rest: float = 10.0
    full: float = 0.9
    spare: float = 0.25
    peak_of: float = 10.0
    lent: float = 1.0


@dataclass(frozen=True)
class Past:
    """What is remembered of an engine.

    Attributes:
        born: of which engine of the name.
        seen: when it was last seen, in seconds of any clock.
        found: its counter then.
        rate: bytes per second that it found; the older, the less they count.
        peak: the most bytes that its requests needed; the older, the less.
        since: when it was first seen.
        raised, lowered: when its limit last went up and down.
    """

    born: int
    seen: float
    found: float | None = None
    rate: float = 0.0
    peak: float = 0.0
    since: float = -math.inf
    raised: float = -math.inf
    lowered: float = -math.inf


@dataclass(frozen=True)
class Move:
    """Another limit for an engine, and why.

    Attributes:
        name: the engine.
        before, limit: bytes that it may map now, and that it is to have.
        why: the reason, as the end of a sentence.
    """

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
    """What is to be done now.

    Attributes:
        moves: the limits that change; who gives comes before who gets.
        shares: what each engine would have if moving were free.
        past: to be given back with the next look.
        notes: what is not as the operator wants it, a sentence each.
    """

    moves: tuple[Move, ...]
    shares: Mapping[str, int]
    past: Mapping[str, Past]
    notes: tuple[str, ...] = field(default=())

    def limit(self, one: Engine) -> int:
        """Return the limit that an engine is to have."""
        return next((move.limit for move in self.moves if move.name == one.name), one.limit)


def rounded_up(size: int, page: int) -> int:
    """Return a size in whole pages."""
    return -(-size // page) * page
