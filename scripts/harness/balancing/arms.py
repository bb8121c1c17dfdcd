"""Who limits the engines: nobody, an equal part for each, or a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.balancing.device import Limits
from harness.balancing.engine import Engine
from harness.balancing.traces import BLOCK
from kvpatch.balance import policy, records

KEPT = 16_000 // BLOCK  # blocks that kvcached keeps for nobody, unless it is told otherwise


class Static(Limits):
    """An equal part for each, for ever."""

    def limit(self, engine: Engine) -> int:
        """Return its part."""
        return self.size // len(self.engines)


class FirstCome(Limits):
    """kvcached alone: who maps a page has it until he frees it."""

    def limit(self, engine: Engine) -> int:
        """Return what it has and what nobody has."""
        return self.size - sum(
            one.mapped * one.bytes_of_block for one in self.engines if one is not engine
        )


class Balanced(Limits):
    """``kvpatch balance``, in a form.

    Args:
        engines, size: as for all.
        counts: returns the counter by which the policy shares what requests do not need.
        settings: of the policy.
        terms: of every engine.
    """

    def __init__(
        self,
        engines: list[Engine],
        size: int,
        counts: Callable[[Engine], float] = lambda engine: engine.found,
        settings: records.Settings | None = None,
        terms: records.Terms | None = None,
    ) -> None:
        super().__init__(engines, size)
        self.terms = terms or records.Terms()
        self.settings = settings or records.Settings()
        self.limits = {one.name: size // len(engines) for one in engines}
        self.past: Mapping[str, records.Past] = {}
        self.moved = self.moves = 0
        self._counts = counts

    def limit(self, engine: Engine) -> int:
        """Return what the policy said last."""
        return self.limits[engine.name]

    def look(self, now: float) -> None:
        """Let the policy move memory, who gives before who gets."""
        plan = policy.plan(
            self._seen(), self.size, self.past, now, lambda name: self.terms, self.settings
        )
        self.past = plan.past
        for move in plan.moves:
            if not move.raises:
                self._set(move)
        for move in policy.grants(plan.moves, self._seen(), self.size, self.settings.page):
            self._set(move)

    def _set(self, move: records.Move) -> None:
        self.moves += 1
        self.moved += abs(move.limit - move.before)
        self.limits[move.name] = move.limit
        (engine,) = (one for one in self.engines if one.name == move.name)
        engine.shrink(move.limit // engine.bytes_of_block)

    def _seen(self) -> list[records.Engine]:
        return [
            records.Engine(
                name=one.name,
                limit=self.limits[one.name],
                mapped=one.mapped * one.bytes_of_block,
                most=self.size,
                least=(one.longest // BLOCK + 1) * one.bytes_of_block,
                needs=one.needs * one.bytes_of_block,
                running=len(one.running),
                waiting=len(one.queue),
                found=self._counts(one),
            )
            for one in self.engines
        ]


class OneLru(Limits):
    """One LRU over what all engines keep for nobody: memory moves at once, block by block.

    No policy that looks once a second can be as good.
    """

    def __init__(self, engines: list[Engine], size: int) -> None:
        super().__init__(engines, size)
        for engine in engines:
            engine.make_room = self._make_room

    def limit(self, engine: Engine) -> int:
        """Return all that its requests leave of the device to it."""
        others = (one for one in self.engines if one is not engine)
        return self.size - sum(
            (one.mapped - len(one.unused)) * one.bytes_of_block for one in others
        )

    def _make_room(self) -> None:
        """Evict the block of the device that was not used for longest, until all have room."""
        while sum(one.mapped * one.bytes_of_block for one in self.engines) > self.size:
            keep = [one for one in self.engines if one.unused]
            coldest = min(keep, key=lambda one: next(iter(one.unused.values())))
            coldest.unused.popitem(last=False)


class InFlight(Balanced):
    """Parts by the requests in flight and those done lately, and never less than what is in use.

    The policy of AIBrix' ModelClaim: 1 + min(in flight, 4) + min(completed since, 4).
    """

    def __init__(self, engines: list[Engine], size: int) -> None:
        super().__init__(engines, size)
        self._done = {one.name: 0 for one in engines}
        self._next = 0.0

    def look(self, now: float) -> None:
        """Set parts every ten seconds."""
        if now < self._next:
            return
        self._next = now + 10.0
        weights, floors = {}, {}
        for one in self.engines:
            done = one.measured.requests - self._done[one.name]
            self._done[one.name] = one.measured.requests
            weights[one.name] = 1 + min(len(one.running) + len(one.queue), 4) + min(done, 4)
            floors[one.name] = one.mapped * one.bytes_of_block
        total = sum(weights.values())
        targets = {name: self.size * weight // total for name, weight in weights.items()}
        # Use is a floor: who has more than his part keeps it, and the others share the rest.
        over = {name for name in targets if floors[name] > targets[name]}
        rest = self.size - sum(floors[name] for name in over)
        share = sum(weights[name] for name in weights if name not in over)
        for one in self.engines:
            if one.name in over:
                self.limits[one.name] = floors[one.name]
            else:
                self.limits[one.name] = max(
                    floors[one.name], rest * weights[one.name] // max(1, share)
                )


@dataclass(frozen=True)
class Arm:
    """One way to limit engines.

    Attributes:
        name: of the arm.
        what: it is.
        make: makes it.
        cached: blocks that an engine keeps for nobody; None for all that fit.
        tier: whether engines have a CPU tier.
    """

    name: str
    what: str
    make: Callable[[list[Engine], int], Limits]
    cached: int | None = None
    tier: bool = True


def _by(
    counts: Callable[[Engine], float] = lambda engine: engine.found, **changes: float
) -> Callable[[list[Engine], int], Limits]:
    return lambda engines, size: Balanced(
        engines,
        size,
        counts,
        records.Settings(**changes),  # type: ignore[arg-type]
    )


def _lending(engines: list[Engine], size: int) -> Limits:
    return Balanced(engines, size, terms=records.Terms(lends=True))


STATIC, ALONE, FIRST = "static parts", "kvcached alone", "first come"
CHOSEN, LENDING = "kvpatch balance", "kvpatch balance --lend '*'"
IDEAL = "one LRU"
ONE_LRU = Arm(IDEAL, "one LRU over the blocks of all engines, which moves at once", OneLru)
COMPARED = (STATIC, ALONE, FIRST, CHOSEN, LENDING)  # of which more loads are run
ARMS = (
    Arm(STATIC, "an equal part for each", Static),
    Arm(ALONE, "first come, first served, without a CPU tier", FirstCome, KEPT, False),
    Arm(FIRST, "first come, first served, 16,000 tokens kept", FirstCome, KEPT),
    Arm("first come, all kept", "first come, first served, everything kept", FirstCome),
    Arm("in flight", "AIBrix' weights; what is in use is a floor", InFlight),
    Arm("by need alone", "what nobody needs is shared equally", _by(lambda engine: 0.0)),
    Arm("by what is looked up", "prefixes by all tokens of prompts", _by(lambda one: one.lookups)),
    Arm("by what is missing", "prefixes by what the device lacks", _by(lambda one: one.asked)),
    Arm(CHOSEN, "prefixes by what is found", _by()),
    Arm(LENDING, "the same; what one request needs is lent while none waits", _lending),
)
