"""The verdicts of the matrix, as the repository's recorded runs, the gates and the rules give them.

``verdicts.json`` has all of them, and ``scripts/docs`` makes it of the evidence, which is not part
of a distribution: ``docs/results/matrix`` in the repository.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "verdicts.json"

NONE = "none"  # the feature of a cell with nothing turned on beside the connector
# What a cell combines, in the order of the tables; a feature is what is turned on beside the rest.
CONNECTORS = ("Offloading", "Simple eager", "Simple lazy", "tiering fs", "Multi")
RUNNERS = ("V1", "V2")
LAYOUTS = ("contiguous", "non-contiguous")
MODELS = ("full attention", "sliding window", "latent attention", "sparse attention", "hybrid")


@dataclass(frozen=True)
class Cell:
    """One combination, by the names in the tables. kvcached has its supported version."""

    vllm: str
    runner: str
    layout: str
    connector: str
    model: str
    feature: str = NONE


AXES = ("connector", "runner", "layout", "model", "feature")
Box = tuple[tuple[str, ...], ...]  # of each of ``AXES``, the values whose product is meant


class Kind(str, Enum):
    """The possible verdicts; a committed matrix has only the first seven."""

    VALIDATED = "validated"
    INFERRED = "inferred"  # between cells that ran with the same patches
    EMULATED = "validated (ACL emulator)"  # only on NPUs: no run on the emulator validates another
    INCOMPATIBLE = "incompatible"
    NOT_VALIDATED = "not validated"
    NO_CPU_ENGINE = "not validated (no engine on a CPU runs it)"  # plain vLLM itself ends there
    ABSENT = "absent in this release"
    UNTESTED = "UNTESTED"
    WRONG = "WRONG"

    @property
    def starts(self) -> bool:
        """Whether start-up admits it, by what ran."""
        return self in (Kind.VALIDATED, Kind.INFERRED)

    @property
    def refused(self) -> bool:
        """Whether start-up refuses it."""
        return self in (Kind.INCOMPATIBLE, Kind.NOT_VALIDATED, Kind.NO_CPU_ENGINE)

    @property
    def red(self) -> bool:
        """Whether a committed matrix must not contain it."""
        return self in (Kind.UNTESTED, Kind.WRONG)


@dataclass(frozen=True)
class Verdict:
    """The verdict of a cell, and its evidence."""

    kind: Kind
    why: str  # the refusal, or the result file
    tagged: str = ""  # for a refused cell, the result file of a run with correct tagged blocks
    ended: str = ""  # for a cell that is not validated, with what plain vLLM ends on a CPU


# Connectors that something no axis names starts with: on which releases it ran, and on which
# that is inferred.
Tried = Mapping[str, tuple[list[str], list[str]]]


@dataclass(frozen=True)
class Matrix:
    """The verdicts of every cell, release by release, oldest first."""

    cells: Mapping[Cell, Verdict]
    # Of a release of vllm-ascend, and the cell of vLLM that it is.
    npus: Mapping[tuple[str, Cell], Verdict] = field(default_factory=dict)
    tried: Mapping[str, Tried] = field(default_factory=dict)  # what starts and is no axis

    @property
    def releases(self) -> list[str]:
        """The inspected releases of vLLM, oldest first."""
        return list(dict.fromkeys(cell.vllm for cell in self.cells))

    def of(self, vllm: str) -> Matrix:
        """Return what is about one release of vLLM."""
        return Matrix(
            {cell: verdict for cell, verdict in self.cells.items() if cell.vllm == vllm},
            {key: verdict for key, verdict in self.npus.items() if key[1].vllm == vllm},
            self.tried,
        )


def boxes(cells: Iterable[Cell]) -> list[Box]:
    """Return cells of one release as few products of values, which together are exactly they."""
    found: list[Box] = [tuple((getattr(cell, name),) for name in AXES) for cell in cells]
    for axis in reversed(range(len(AXES))):
        merged: dict[Any, Box] = {}
        for box in found:
            key = box[:axis] + box[axis + 1 :]
            before = merged.get(key, box)[axis] if key in merged else ()
            merged[key] = (*box[:axis], (*before, *box[axis]), *box[axis + 1 :])
        found = list(merged.values())
    return found


def text(matrix: Matrix) -> str:
    """Return a matrix as the text of ``verdicts.json``: a line for each verdict and product."""
    known = {one: n for n, one in enumerate(dict.fromkeys(_every(matrix)))}
    of_releases: dict[str, dict[int, list[Cell]]] = {}
    for cell, verdict in matrix.cells.items():
        of_releases.setdefault(cell.vllm, {}).setdefault(known[verdict], []).append(cell)
    parts: dict[str, Sequence[Any]] = {
        "features": features(matrix.cells),
        "verdicts": [asdict(one) for one in known],
        "cells": [
            [vllm, n, *box]
            for vllm, groups in of_releases.items()
            for n, group in groups.items()
            for box in boxes(group)
        ],
        "npus": [[ascend, known[one], asdict(cell)] for (ascend, cell), one in matrix.npus.items()],
        "tried": [[name, connectors] for name, connectors in matrix.tried.items()],
    }
    lines = {
        name: ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
        for name, rows in parts.items()
    }
    return "{" + ",".join(f'\n "{name}": [\n{rows}\n ]' for name, rows in lines.items()) + "\n}\n"


@cache
def read(file: Path = FILE) -> Matrix:
    """Return the recorded matrix."""
    made = json.loads(file.read_text(encoding="utf-8"))
    known = [Verdict(**one | {"kind": Kind(one["kind"])}) for one in made["verdicts"]]
    cells = {
        Cell(vllm, runner, layout, connector, model, feature): known[n]
        for vllm, n, *box in made["cells"]
        for connector, runner, layout, model, feature in product(*box)
    }
    releases = {vllm: n for n, vllm in enumerate(dict.fromkeys(cell.vllm for cell in cells))}

    def place(cell: Cell) -> tuple[int, ...]:
        return (
            releases[cell.vllm],
            RUNNERS.index(cell.runner),
            LAYOUTS.index(cell.layout),
            CONNECTORS.index(cell.connector),
            made["features"].index(cell.feature),
            MODELS.index(cell.model),
        )

    return Matrix(
        {cell: cells[cell] for cell in sorted(cells, key=place)},
        {(ascend, Cell(**cell)): known[n] for ascend, n, cell in made["npus"]},
        {name: {who: (ran, more) for who, (ran, more) in of.items()} for name, of in made["tried"]},
    )


def features(cells: Iterable[Cell]) -> list[str]:
    """Return the features of cells, in the order of the newest release, which has all of them."""
    every = list(cells)
    newest = (cell.feature for cell in every if cell.vllm == every[-1].vllm)
    return list(dict.fromkeys((*newest, *(cell.feature for cell in every))))


def counts(found: Iterable[Verdict]) -> dict[str, int]:
    """Return how many cells have each verdict, without verdicts that no cell has."""
    counted = Counter(verdict.kind for verdict in found)
    return {kind.value: counted[kind] for kind in Kind if counted[kind]}


def _every(matrix: Matrix) -> Iterable[Verdict]:
    yield from matrix.cells.values()
    yield from matrix.npus.values()
