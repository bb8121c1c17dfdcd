"""How old recorded runs are, and which runs today's code asks for.

A run is fresh if what it executed is unchanged: rows, units and oracle. It is covered if each unit
that changed since was executed by a fresh right run with the same patch set; else it is old. A
landing needs, for each unit that changed, a right run of it as it is now on the newest release and
on the oldest that executes it: ``landing`` chooses the fewest. A version is tagged with ``cover``
fresh, where each pair of values of two axes is in a run.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from itertools import combinations
from typing import NamedTuple, TypeVar

from packaging.version import Version

from harness.evidence import oracle, units
from harness.matrix import recorded
from harness.matrix.recorded import LEVELS, ROW, Code, Run
from kvpatch import patches
from kvpatch.matrix.verdicts import Cell
from kvpatch.patch import WITH_SLEEP, WITH_TIERS, Patch

# The connectors that have what a patch needs, by ``Patch.only_with``; no cell has sleep mode.
_WITH: dict[str, tuple[str, ...]] = {WITH_TIERS: ("tiering fs",), WITH_SLEEP: ()}
_FEATURE = "feature:"
Key = TypeVar("Key")
Thing = TypeVar("Thing")
PatchSet = frozenset[str]  # rows with their digests


class Age(str, Enum):
    """The ages of a right run."""

    FRESH = "fresh"
    COVERED = "covered"
    OLD = "old"


class Ran(NamedTuple):
    """A recorded engine run: its cell, and the code it ran on."""

    cell: Cell
    run: Run

    @property
    def code(self) -> Code:
        """The code that it ran on."""
        return self.run.code


class Wanted(NamedTuple):
    """A fresh run that a unit needs: the release that it needs it on."""

    unit: str
    vllm: str


@dataclass
class Today:
    """The digests of today's code.

    Args:
        fixed: the digests of units that are not in its modules; today's if not given.
    """

    tree: units.Tree = field(default_factory=units.Tree)
    fixed: Mapping[str, str] = field(
        default_factory=lambda: units.of_rows() | units.of_files() | oracle.fixed()
    )

    def digest(self, name: str) -> str | None:
        """Return the digest of a unit; None if there is no such unit any more."""
        if name in self.fixed:
            return self.fixed[name]
        unit = self.tree.get(name)
        return unit.digest if unit is not None else None


class Evidence:
    """The recorded engine runs, compared with today's code."""

    def __init__(self, ran: Iterable[Ran], today: Today | None = None) -> None:
        self.ran = list(ran)
        self.today = today or Today()
        self._changed: dict[int, frozenset[str]] = {}
        self._units: dict[int, Mapping[str, str]] = {}

    def units(self, one: Ran) -> Mapping[str, str]:
        """Return the digests of the units that a run executed, by the names they have today."""
        key = id(one.code)
        if key not in self._units:
            self._units[key] = self.today.tree.followed(one.code.units)
        return self._units[key]

    def changed(self, one: Ran) -> frozenset[str]:
        """Return the units that a run executed and that are others today, and rows that came."""
        key = id(one.run)
        if key not in self._changed:
            then = self.units(one)
            found = {name for name in then if self.today.digest(name) != then[name]}
            came = {f"{ROW}{patch.id}" for patch in rows(one)} - then.keys()
            acting = {name for name in found | came if _acts(name, one.cell)}
            self._changed[key] = frozenset(acting)
        return self._changed[key]

    def age(self, one: Ran) -> Age:
        """Return the age of a run."""
        if not one.code.units:
            return Age.OLD
        changed = self.changed(one)
        if not changed:
            return Age.FRESH
        shown = self._shown.get((one.run.level, _patch_set(one)))
        there = {name for name in changed if self.today.digest(name) is not None}
        return Age.COVERED if shown is not None and there <= shown else Age.OLD

    @cached_property
    def _shown(self) -> dict[tuple[str, PatchSet], set[str]]:
        """The units that fresh right runs executed, by level and patch set."""
        found: dict[tuple[str, PatchSet], set[str]] = {}
        for one in self.fresh():
            found.setdefault((one.run.level, _patch_set(one)), set()).update(self.units(one))
        return found

    def fresh(self) -> Iterator[Ran]:
        """Iterate over the fresh right runs."""
        for one in self.ran:
            if one.run.right and one.code.units and not self.changed(one):
                yield one

    def counts(self) -> Counter[Age]:
        """Return how many right runs have each age."""
        return Counter(self.age(one) for one in self.ran if one.run.right)

    def wanted(self) -> set[Wanted]:
        """Return the runs that a landing lacks.

        Of each unit of today that a run executed, and of each row that came: a right run of it as
        it is today, on the newest and on the oldest release where a recorded run executes it.
        """
        missing = set()
        for name, ran in self._executing.items():
            digest = self.today.digest(name)
            releases = sorted({one.cell.vllm for one in ran}, key=Version)
            for vllm in {releases[0], releases[-1]}:
                if not any(
                    one.cell.vllm == vllm and one.run.right and self.units(one).get(name) == digest
                    for one in ran
                ):
                    missing.add(Wanted(name, vllm))
        return missing

    @cached_property
    def _executing(self) -> dict[str, list[Ran]]:
        """The runs that execute each unit of today, by their records; rows that came included."""
        found: dict[str, list[Ran]] = defaultdict(list)
        for one in self.ran:
            if one.run.level in (LEVELS[0], recorded.NPU):
                for name in self._executes(one):
                    found[name].append(one)
        return found

    def _executes(self, one: Ran) -> set[str]:
        there = {name for name in self.units(one) if self.today.digest(name) is not None}
        came = {name for name in self.changed(one) if name.startswith(ROW)}
        return {name for name in there | came if _acts(name, one.cell)}

    def landing(self) -> list[Ran]:
        """Return the runs to make again before a landing: few that execute all that is wanted."""
        offers = {
            index: {Wanted(name, one.cell.vllm) for name in self._executes(one)}
            for index, one in enumerate(self.ran)
            if one.run.level in (LEVELS[0], recorded.NPU) and one.code.units
        }
        return [self.ran[index] for index in greedy(offers, self.wanted())]

    def unseen(self) -> list[str]:
        """Return the functions of kvpatch that no recorded run executes: those of tests alone."""
        return [
            name
            for module in self.today.tree.files
            if module.startswith("kvpatch.") and not module.startswith("kvpatch.matrix")
            for name, unit in self.today.tree.of_module(module).items()
            if unit.is_function and name not in self._executing
        ]


def runs() -> list[Ran]:
    """Return the recorded runs of engines."""
    levels = (*LEVELS[:2], recorded.NPU)
    every = (*recorded.runs().items(), *recorded.on_npu().items())
    return [Ran(cell, run) for cell, of_cell in every for run in of_cell if run.level in levels]


def greedy(offers: Mapping[Key, Collection[Thing]], wanted: Iterable[Thing]) -> list[Key]:
    """Return few offers that have all that is wanted and that any of them has, the best first."""
    left = set(wanted)
    chosen = []
    open_offers = {key: set(offer) & left for key, offer in offers.items()}
    while open_offers:
        best = max(open_offers, key=lambda key: len(open_offers[key]))
        if not open_offers[best]:
            break
        chosen.append(best)
        left -= open_offers.pop(best)
        open_offers = {key: offer & left for key, offer in open_offers.items()}
    return chosen


def pairs(cells: Iterable[Cell]) -> list[Cell]:
    """Return few cells that have every pair of values of two axes that any of the cells has."""
    offers = {cell: set(combinations(vars(cell).items(), 2)) for cell in cells}
    return greedy(offers, set().union(*offers.values()))


def _patch_set(one: Ran) -> PatchSet:
    return _digests(rows(one))


def rows(one: Ran) -> tuple[Patch, ...]:
    """Return the patches that a run's release has today, of the features in force then."""
    then = {name for name in one.code.units if name.startswith(_FEATURE)}
    return rows_of(one.cell.vllm, frozenset(name.removeprefix(_FEATURE) for name in then))


@cache
def rows_of(vllm: str, features: frozenset[str]) -> tuple[Patch, ...]:
    """Return the patches of a release, of the features with these names."""
    return tuple(
        patch
        for feature, found in patches.at(Version(vllm))
        if feature.name in features
        for patch in found
    )


def patch_set(vllm: str) -> PatchSet:
    """Return what a release is patched with, without what is of a machine or mode."""
    always = frozenset(one.name for one in patches.FEATURES if one.wanted is None)
    return _digests(rows_of(vllm, always))


def _digests(of: Iterable[Patch]) -> PatchSet:
    return frozenset(f"{patch.id} {units.of_row(patch)}" for patch in of)


def _acts(name: str, cell: Cell) -> bool:
    """Return whether a unit can do anything in a cell, by what has to be configured for a row."""
    with_it = _only_with().get(name.removeprefix(ROW), "") if name.startswith(ROW) else ""
    return cell.connector in _WITH.get(with_it, (cell.connector,))


@cache
def _only_with() -> dict[str, str]:
    every = (patch for one in patches.FEATURES for patch in one.patches)
    return {patch.id: patch.only_with for patch in every}
