"""The matrix in short form: cells grouped by verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvpatch import admitted
from kvpatch.matrix import verdicts
from kvpatch.matrix.verdicts import (
    AXES,
    CONNECTORS,
    LAYOUTS,
    MODELS,
    NONE,
    RUNNERS,
    Cell,
    Kind,
    Tried,
    Verdict,
    boxes,
)
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
    """Return cells of one release in few lines, each a product of values."""
    everything = {"connector": CONNECTORS, "runner": RUNNERS, "layout": LAYOUTS, "model": MODELS}
    lines = []
    for *box, features in boxes(cells):
        words = [
            f"any {name}" if set(values) == set(everything[name]) else " or ".join(values)
            for name, values in zip(AXES, box, strict=False)
        ]
        if features != (NONE,):
            words.append(f"with {' or '.join(features)}")
        lines.append(", ".join(words))
    return lines


def summary(found: Mapping[Cell, Verdict], vllm: str, connector: str, feature: str = NONE) -> str:
    """Return a release, connector and feature in a few words: what starts, or the first verdict."""
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
    """Return one release and connector as one mark, over full attention and sliding windows."""
    kinds = [
        verdict.kind
        for cell, verdict in found.items()
        if (cell.vllm, cell.connector, cell.feature) == (vllm, connector, NONE)
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
    models: dict[tuple[str, ...], list[str]] = {}
    for model in MODELS:
        here = [cell for cell in cells if cell.model == model]
        layouts = {cell.layout for cell in here}
        where = [" ".join(sorted({cell.runner for cell in here}))]
        where += [] if layouts == set(LAYOUTS) else sorted(layouts)
        if here:
            models.setdefault(tuple(where), []).append(model)
    return " and ".join(", ".join((*where, *names)) for where, names in models.items())


def summaries(found: Mapping[Cell, Verdict]) -> list[tuple[str, ...]]:
    """Return a line per release, newest first: its name and a summary per connector."""
    return [
        (vllm, *(summary(found, vllm, connector) for connector in CONNECTORS))
        for vllm in _newest_first(found)
    ]


def features(found: Mapping[Cell, Verdict]) -> list[tuple[str, ...]]:
    """Return name, release, and a summary per connector of what starts, newest first."""
    some = {(cell.feature, cell.vllm) for cell, verdict in found.items() if verdict.kind.starts}
    return [
        (name, vllm, *(summary(found, vllm, each, name) for each in CONNECTORS))
        for name in verdicts.features(found)
        if name != NONE
        for vllm in _newest_first(found)
        if (name, vllm) in some
    ]


def tried(found: Mapping[str, Tried]) -> list[tuple[str, ...]]:
    """Return what is no axis and starts, with releases per connector, that ran or are inferred."""
    columns = list(dict.fromkeys(map(admitted.kind_of, CONNECTORS)))
    return [
        (f"{name}, {model}" if model else name, *map(_ran, there))
        for name, by_connector in found.items()
        for model in admitted.KINDS
        if any(there := [by_connector.get(admitted.kind_of(one, model)) for one in columns])
    ]


def grid(found: Mapping[Cell, Verdict], releases: Iterable[str]) -> list[tuple[str, ...]]:
    """Return a line per release, in the given order: its name and a mark per connector."""
    return [
        (vllm, *(mark(found, vllm, connector) for connector in CONNECTORS)) for vllm in releases
    ]


def _newest_first(found: Mapping[Cell, Verdict]) -> list[str]:
    return list(dict.fromkeys(cell.vllm for cell in found))[::-1]


def _ran(releases: tuple[list[str], list[str]] | None) -> str:
    on, inferred = releases or ([], [])
    said = [in_ranges(on)] if on else []
    said += [f"inferred: {in_ranges(inferred)}"] if inferred else []
    return "; ".join(said) or ABSENT
