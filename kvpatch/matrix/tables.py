"""The matrix in few words: cells that have the same verdict, said together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvpatch.matrix import axes, shapes
from kvpatch.matrix.axes import Cell
from kvpatch.matrix.verdicts import Kind, Verdict

_INNER = ("runner", "layout", "model")


def grouped(found: Mapping[Cell, Verdict]) -> list[tuple[Verdict, list[Cell]]]:
    """Return the verdicts with their cells, right ones first."""
    groups: dict[Verdict, list[Cell]] = {}
    for cell, verdict in found.items():
        groups.setdefault(verdict, []).append(cell)
    order = list(Kind)
    return sorted(groups.items(), key=lambda group: order.index(group[0].kind))


def describe(cells: Iterable[Cell]) -> list[str]:
    """Return cells of one release as few lines: axis by axis, those alike together.

    Every line is a product of values, and together they are exactly ``cells``.
    """
    names = ("kvcached", "connector", "runner", "layout", "model")
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
        "kvcached": set(shapes.releases("kvcached")),
        "connector": {one.name for one in axes.CONNECTORS},
        "runner": set(axes.RUNNERS),
        "layout": set(axes.LAYOUTS),
        "model": {one.name for one in axes.MODELS},
    }
    lines = []
    for box in boxes:
        said = [
            f"any {name}" if set(values) == everything[name] else " or ".join(values)
            for name, values in zip(names, box, strict=True)
        ]
        said[0] = said[0] if said[0].startswith("any") else f"kvcached {said[0]}"
        lines.append(", ".join(said))
    return lines


def summary(found: Mapping[Cell, Verdict], vllm: str, kvcached: str, connector: str) -> str:
    """Return one release and connector in a few words: what is right, or what else it is."""
    here = {
        cell: verdict
        for cell, verdict in found.items()
        if (cell.vllm, cell.kvcached, cell.connector) == (vllm, kvcached, connector)
    }
    right = [cell for cell, verdict in here.items() if verdict.kind.right]
    tagged = [cell for cell, verdict in here.items() if verdict.tagged]
    words = []
    if right:
        levels = {here[cell].kind for cell in right}
        level = "engine" if levels == {Kind.RIGHT_ENGINE} else "tagged bytes"
        words.append(f"right ({level}): {_together(right)}")
    elif not tagged:
        kinds = {verdict.kind for cell, verdict in here.items() if cell.runner == axes.RUNNERS[0]}
        worst = next(kind for kind in reversed(Kind) if kind in kinds)
        return "absent" if worst is Kind.ABSENT else worst.value
    if tagged:
        words.append(f"refused, tagged bytes right: {_together(tagged)}")
    return "; ".join(words)


def _together(cells: list[Cell]) -> str:
    """Return the runners and models of cells, and the layouts where not all are among them.

    Models that have the same runners and layouts are named together.
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


def summaries(found: Mapping[Cell, Verdict], kvcached: str) -> list[tuple[str, ...]]:
    """Return a line for each release, newest first: its name and a word for each connector."""
    return [
        (
            vllm,
            *(summary(found, vllm, kvcached, connector.name) for connector in axes.CONNECTORS),
        )
        for vllm in reversed(shapes.releases("vllm"))
    ]


def alike(lines: Iterable[tuple[str, ...]]) -> list[tuple[tuple[str, ...], str]]:
    """Return the words of neighbouring releases once, with the releases' names.

    Args:
        lines: ``summaries``, or some of them.
    """
    runs: list[tuple[tuple[str, ...], list[str]]] = []
    for vllm, *words in lines:
        if not runs or runs[-1][0] != tuple(words):
            runs.append((tuple(words), []))
        runs[-1][1].append(vllm)
    return [(words, ", ".join(reversed(releases))) for words, releases in runs]
