"""The verdict of a cell, and what it rests on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from kvpatch import configuration, gate, registry, versions
from kvpatch.errors import Refusal
from kvpatch.matrix import shapes
from kvpatch.matrix.axes import Cell, cells, configuration_of, connector_of

LEVELS = ("engine", "bytes")


class Kind(str, Enum):
    """Everything a cell can be; a committed matrix has only the first four."""

    RIGHT_ENGINE = "right (engine)"
    RIGHT_BYTES = "right (tagged bytes)"
    REFUSED = "refused"
    ABSENT = "absent in this release"
    UNTESTED = "UNTESTED"
    WRONG = "WRONG"

    @property
    def right(self) -> bool:
        """Whether it runs and is known to be right."""
        return self in (Kind.RIGHT_ENGINE, Kind.RIGHT_BYTES)

    @property
    def red(self) -> bool:
        """Whether no committed matrix may have it."""
        return self in (Kind.UNTESTED, Kind.WRONG)


@dataclass(frozen=True)
class Verdict:
    """What a cell is, and the sentence or the result file that says so.

    Attributes:
        kind: what it is.
        why: the sentence or the result file.
        tagged: of a refused cell, the result file of tagged blocks that were right in it.
    """

    kind: Kind
    why: str
    tagged: str = ""


@cache
def evidence(data: Path = shapes.DATA) -> dict[Cell, Verdict]:
    """Return what the recorded runs say; an engine's word goes over tagged bytes'."""
    found: dict[Cell, Verdict] = {}
    kinds = {"engine": Kind.RIGHT_ENGINE, "bytes": Kind.RIGHT_BYTES}
    for level in reversed(LEVELS):
        for path in sorted((data / level).glob("*.json")):
            result: dict[str, Any] = json.loads(path.read_text())
            for run in result["runs"]:
                axes = {name: run[name] for name in ("runner", "layout", "connector", "model")}
                cell = Cell(vllm=result["vllm"], kvcached=result["kvcached"], **axes)
                kind = kinds[level] if run["right"] else Kind.WRONG
                found[cell] = Verdict(kind, f"{level}/{path.name}")
    return found


def refusal(cell: Cell, tried: bool = False) -> str | None:
    """Return the sentence that start-up would end with, or None where the cell starts.

    With ``tried``, where the operator names the release of vLLM as one to try.
    """
    of_releases: str | None = _of_releases(cell.vllm, cell.kvcached, tried)
    if of_releases is not None:
        return of_releases
    found = (shapes.release("vllm", cell.vllm), shapes.release("kvcached", cell.kvcached))
    try:
        with versions.assume(*found):
            configuration.check(configuration_of(cell))
    except Refusal as refusal:
        return str(refusal)
    return None


@cache
def _of_releases(vllm: str, kvcached: str, tried: bool) -> str | None:
    """Return the sentence of the gates, which ask for the releases alone."""
    allowed = {gate.ALLOW_VLLM: vllm} if tried else {}
    try:
        found = shapes.release("vllm", vllm)
        gate.check_range(found, registry.VLLM_RANGE, allowed)
        found = shapes.release("kvcached", kvcached)
        gate.check_range(found, registry.KVCACHED_RANGE, allowed)
        reason: Refusal | None = _features(vllm, kvcached, allowed)
        if reason is not None:
            raise reason
    except Refusal as refusal:
        return str(refusal)
    return None


def _features(vllm: str, kvcached: str, allowed: Mapping[str, str]) -> Refusal | None:
    """Return the refusal of a feature that cannot be applied to two releases."""
    found = (shapes.release("vllm", vllm), shapes.release("kvcached", kvcached))
    look = shapes.look(shapes.releases("vllm")[vllm], shapes.releases("kvcached")[kvcached])
    for feature in registry.FEATURES:
        if feature.wanted is not None:  # for some machines, or a mode; cells are of neither
            continue
        verdict = gate.check_feature(feature, *found, look, allowed)
        refusal = gate.refusal(feature, verdict)
        if refusal is not None:
            return refusal
    return None


def missing(cell: Cell) -> str | None:
    """Return what a cell needs and its release of vLLM does not have."""
    needs: tuple[str, ...] = (
        *connector_of(cell).needs,
        *(("Model Runner V2",) if cell.runner == "V2" else ()),
    )
    present: dict[str, str | None] = shapes.releases("vllm")[cell.vllm].targets
    for need in needs:
        if present.get(shapes.PRESENCE[need]) is None:
            return need
    return None


def verdict(cell: Cell) -> Verdict:
    """Return the verdict of one cell."""
    need = missing(cell)
    if need is not None:
        return Verdict(Kind.ABSENT, f"vLLM {cell.vllm} has no {need}")
    sentence = refusal(cell)
    seen = evidence().get(cell, Verdict(Kind.UNTESTED, "no run of it is recorded"))
    if sentence is None:
        return seen
    return Verdict(Kind.REFUSED, sentence, seen.why if seen.kind is Kind.RIGHT_BYTES else "")


def verdicts(vllm: str | None = None) -> dict[Cell, Verdict]:
    """Return the verdict of every cell, or of those of one release of vLLM."""
    return {cell: verdict(cell) for cell in cells(vllm)}


def forget() -> None:
    """Compute anew what was remembered of the registry and the results."""
    for remembered in (_of_releases, evidence, shapes.releases):
        remembered.cache_clear()


def lost(found: Mapping[Cell, Verdict]) -> list[Cell]:
    """Return the cells that an engine's run proved right and that are no longer right."""
    return [
        cell
        for cell, recorded in evidence().items()
        if recorded.kind is Kind.RIGHT_ENGINE and not (cell in found and found[cell].kind.right)
    ]


def counts(found: Iterable[Verdict]) -> dict[str, int]:
    """Return how many cells have each verdict; those that none has are left out."""
    counted = Counter(verdict.kind for verdict in found)
    return {kind.value: counted[kind] for kind in Kind if counted[kind]}
