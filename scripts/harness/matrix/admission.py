"""``admitted.json``: the cells that start with more turned on, by the runs that were right."""

from collections.abc import Callable, Iterable
from pathlib import Path

from harness import ROOT
from harness.matrix import axes, derive, record
from kvpatch import admitted, supported
from kvpatch.matrix.verdicts import Cell

FILE = Path("kvpatch") / admitted.FILE.name
Table = dict[str, dict[str, list[str]]]


def earned() -> Table:
    """Return the table that the recorded runs give."""
    by_cell = _table(lambda cell: derive.ran_right(cell) or bool(derive.by_shared_seams(cell)))
    return by_cell | {name: found for name in axes.TRIED if (found := derive.admitted_with(name))}


def tried(features: Iterable[str], releases: Iterable[str], models: Iterable[str] = ()) -> Table:
    """Return the table that a trial has: what is earned, and every cell that is to run.

    Args:
        models: the kinds of model that it is to run with; all if none is named.
    """
    table, names, versions = earned(), set(features), set(releases)
    known = cells_of(table)
    kinds = set(models) or {one.name for one in axes.MODELS}
    return table | _table(
        lambda cell: (
            (cell.feature in names and cell.vllm in versions and cell.model in kinds)
            or (cell.feature, cell.vllm, _name(cell)) in known
        )
    )


def cells_of(table: admitted.Table) -> set[tuple[str, str, str]]:
    """Return the cells of a table: feature, release and the name of each."""
    return {
        (feature, release, name)
        for feature, by_release in table.items()
        for release, names in by_release.items()
        for name in names
    }


def write(table: admitted.Table, root: Path = ROOT) -> None:
    """Write a table into a tree."""
    record.write(root / FILE, dict(table))


def _name(cell: Cell) -> str:
    return admitted.name_of(cell.runner, cell.layout, cell.connector, cell.model)


def _table(holds: Callable[[Cell], bool]) -> Table:
    found: Table = {feature.name: {} for feature in axes.FEATURES}
    for release in supported.validated():
        for cell in filter(axes.only_admitted, axes.cells(release)):
            if holds(cell):
                found[cell.feature].setdefault(release, []).append(_name(cell))
    return {name: by_release for name, by_release in found.items() if by_release}
