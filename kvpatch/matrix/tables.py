"""The matrix in short form: cells grouped by verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvpatch import admitted
from kvpatch.matrix import axes, signatures, verdicts
from kvpatch.matrix.axes import Cell
from kvpatch.matrix.verdicts import Kind, Verdict
from kvpatch.supported import in_ranges

# Marks in a grid of releases and connectors: all cells that vLLM has are validated, some are,
# none is, and vLLM has none.
ALL, PART, REFUSED, ABSENT = "●", "◐", "○", "-"


def grouped(found: Mapping[Cell, Verdict]) -> list[tuple[Verdict, list[Cell]]]:
    """Return the verdicts with their cells, validated cells first."""
    groups: dict[Verdict, list[Cell]] = {}
    for cell, verdict in found.items():
        groups.setdefault(verdict, []).append(cell)
    order = list(Kind)
    return sorted(groups.items(), key=lambda group: order.index(group[0].kind))


def describe(cells: Iterable[Cell]) -> list[str]:
    """Return cells of one release in few lines, merged axis by axis.

    Every line is a product of values, and together they are exactly ``cells``.
    """
    names = ("connector", "runner", "layout", "model", "feature")
    boxes: list[list[tuple[str, ...]]] = [
        [(getattr(cell, name),) for name in names] for cell in cells
    ]
    for axis in reversed(range(len(names))):
        merged: dict[Any, list[tuple[str, ...]]] = {}
        for box in boxes:
            key = tuple(box[:axis] + box[axis + 1 :])
            if key in merged:
                merged[key][axis] += box[axis]
            else:
                merged[key] = list(box)
        boxes = list(merged.values())
    everything = {
        "connector": {one.name for one in axes.CONNECTORS},
        "runner": set(axes.RUNNERS),
        "layout": set(axes.LAYOUTS),
        "model": {one.name for one in axes.MODELS},
    }
    lines = []
    for *box, features in boxes:
        words = [
            f"any {name}" if set(values) == everything[name] else " or ".join(values)
            for name, values in zip(names, box, strict=False)
        ]
        if features != (axes.NONE,):
            words.append(f"with {' or '.join(features)}")
        lines.append(", ".join(words))
    return lines


def summary(
    found: Mapping[Cell, Verdict], vllm: str, connector: str, feature: str = axes.NONE
) -> str:
    """Return one release, connector and feature in a few words: what starts, or the verdict.

    The verdict of what is refused is that of the first kind of model; a connector that a feature
    is not combined with has none.
    """
    here = {
        cell: verdict
        for cell, verdict in found.items()
        if (cell.vllm, cell.connector, cell.feature) == (vllm, connector, feature)
    }
    if not here:
        return ABSENT
    starting = {
        kind: [cell for cell, verdict in here.items() if verdict.kind is kind]
        for kind in (Kind.VALIDATED, Kind.INFERRED)
    }
    tagged = [cell for cell, verdict in here.items() if verdict.tagged]
    words = []
    if starting[Kind.VALIDATED]:
        words.append(_together(starting[Kind.VALIDATED]))
    if starting[Kind.INFERRED]:
        words.append(f"inferred: {_together(starting[Kind.INFERRED])}")
    if not words and not tagged:
        # What is refused is refused for different reasons; the simplest model has the first.
        kind = next(iter(here.values())).kind
        return "absent" if kind is Kind.ABSENT else kind.value
    if tagged:
        words.append(f"refused, tagged bytes right: {_together(tagged)}")
    return "; ".join(words)


def mark(found: Mapping[Cell, Verdict], vllm: str, connector: str) -> str:
    """Return one release and connector as one mark, over full attention and sliding windows.

    Latent attention and hybrid models are not counted.
    """
    kinds = [
        verdict.kind
        for cell, verdict in found.items()
        if (cell.vllm, cell.connector, cell.feature) == (vllm, connector, axes.NONE)
        and cell.model in ("full attention", "sliding window")
        and verdict.kind is not Kind.ABSENT
    ]
    if not kinds:
        return ABSENT
    validated = kinds.count(Kind.VALIDATED)
    return ALL if validated == len(kinds) else PART if validated else REFUSED


def on_npus(found: Mapping[tuple[str, Cell], Verdict]) -> list[tuple[str, ...]]:
    """Return a line per release of vllm-ascend, newest first: its name and a verdict each."""
    releases = dict.fromkeys(ascend for ascend, _ in found)
    return [
        (
            f"vllm-ascend {ascend} on an NPU",
            *(verdict.kind.value for (of, _), verdict in found.items() if of == ascend),
        )
        for ascend in reversed(releases)
    ]


def _together(cells: list[Cell]) -> str:
    """Return the runners and models of cells, and the layouts unless both are among them.

    Models with the same runners and layouts are listed together.
    """
    models: dict[tuple[str, ...], list[str]] = {}
    for model in axes.MODELS:
        here = [cell for cell in cells if cell.model == model.name]
        layouts = {cell.layout for cell in here}
        where = [" ".join(sorted({cell.runner for cell in here}))]
        where += [] if layouts == set(axes.LAYOUTS) else sorted(layouts)
        if here:
            models.setdefault(tuple(where), []).append(model.name)
    return " and ".join(", ".join((*where, *names)) for where, names in models.items())


def summaries(found: Mapping[Cell, Verdict]) -> list[tuple[str, ...]]:
    """Return a line per release, newest first: its name and a summary per connector."""
    return [
        (vllm, *(summary(found, vllm, connector.name) for connector in axes.CONNECTORS))
        for vllm in reversed(signatures.releases("vllm"))
    ]


def features(found: Mapping[Cell, Verdict]) -> list[tuple[str, ...]]:
    """Return a line per feature and release in which some of it starts, newest first.

    Its name, the release and a summary per connector.
    """
    some = {(cell.feature, cell.vllm) for cell, verdict in found.items() if verdict.kind.starts}
    return [
        (one.name, vllm, *(summary(found, vllm, each.name, one.name) for each in axes.CONNECTORS))
        for one in axes.FEATURES
        if one.name != axes.NONE
        for vllm in reversed(signatures.releases("vllm"))
        if (one.name, vllm) in some
    ]


def tried() -> list[tuple[str, ...]]:
    """Return a line per setting that is no axis, and per pair, that starts: name, connectors.

    Of each connector the releases on which engines ran with it, and those that are inferred.
    """
    lines = []
    for name in axes.TRIED:
        ran, starts = verdicts.ran_with(name), verdicts.admitted_with(name)
        words = []
        for connector in dict.fromkeys(admitted.kind_of(one.name) for one in axes.CONNECTORS):
            on = [vllm for vllm, of in ran.items() if connector in of and vllm in starts]
            more = [vllm for vllm, of in starts.items() if connector in of and vllm not in on]
            said = [in_ranges(on)] if on else []
            said += [f"inferred: {in_ranges(more)}"] if more else []
            words.append("; ".join(said) or ABSENT)
        if starts:
            lines.append((name, *words))
    return lines


def grid(found: Mapping[Cell, Verdict], releases: Iterable[str]) -> list[tuple[str, ...]]:
    """Return a line per release, in the given order: its name and a mark per connector."""
    return [
        (vllm, *(mark(found, vllm, connector.name) for connector in axes.CONNECTORS))
        for vllm in releases
    ]
