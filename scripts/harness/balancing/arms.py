"""Who limits the engines: nobody, an equal part for each, or a policy."""

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
    """``kvpatch balance``, with the same terms for every engine."""

    def __init__(
        self, engines: list[Engine], size: int, terms: records.Terms | None = None
    ) -> None:
        super().__init__(engines, size)
        self.terms = terms or records.Terms()
        self.settings = records.Settings()
        self.limits = {one.name: size // len(engines) for one in engines}
        self.past: Mapping[str, records.Past] = {}
        self.moves = 0

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
                found=one.found,
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


@dataclass(frozen=True)
class Arm:
    """One way to limit engines.

    Attributes:
        name: of the arm.
        make: makes it.
        cached: blocks that an engine keeps for nobody; None for all that fit.
    """

    name: str
    make: Callable[[list[Engine], int], Limits]
    cached: int | None = None


def _lending(engines: list[Engine], size: int) -> Limits:
    return Balanced(engines, size, records.Terms(lends=True))


# Engines with a CPU tier lend by themselves: what they lend is simulated with the flag.
STATIC, IDEAL, LENDING = "static parts", "one LRU", "kvpatch balance --lend '*'"
ARMS = (
    Arm(STATIC, Static),
    Arm("first come", FirstCome, KEPT),
    Arm("kvpatch balance", Balanced),
    Arm(LENDING, _lending),
    Arm(IDEAL, OneLru),
)
