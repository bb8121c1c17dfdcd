"""The section of docs/balance.md on the simulation, from its result file alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from harness import markdown
from harness.balancing.arms import STATIC

Run = dict[str, Any]


def render(path: Path, page: str) -> str:
    """Return a page with its section renewed.

    Args:
        path: the result file.
        page: the page, with its markers.

    Raises:
        SystemExit: the page has no place for it.
    """
    result = json.loads(path.read_text())
    values = {
        "result": result,
        "tables": tables(result),
        "grown": grown(result),
        "draws": draws(result),
    }
    return markdown.put(page, "balance", markdown.render("balance.md", **values))


def draws(result: dict[str, Any]) -> int:
    """Return how many draws of the traces were run."""
    return len({run["seed"] for run in result["runs"]})


def tables(result: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of each load: an arm, its tokens, its first tokens, its worst model."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for load in result["loads"]:
        runs = [run for run in result["runs"] if run["load"] == load]
        static = {run["seed"]: run for run in runs if run["arm"] == STATIC}
        for arm in result["arms"]:
            own = [run for run in runs if run["arm"] == arm]
            if own:
                found.setdefault(load, []).append((arm, *cells(own, static)))
    return found


def grown(result: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of each kind and load: how many times the load, an arm, its ratios."""
    found: dict[str, list[tuple[str, ...]]] = {}
    every = result["grows"]
    for kind, load in product(result["kinds"], dict.fromkeys(run["load"] for run in every)):
        here = [run for run in every if (run["kind"], run["load"]) == (kind, load)]
        for times in dict.fromkeys(run["times"] for run in here):
            runs = [run for run in here if run["times"] == times]
            static = {run["seed"]: run for run in runs if run["arm"] == STATIC}
            for arm in dict.fromkeys(run["arm"] for run in runs):
                if arm != STATIC:
                    own = [run for run in runs if run["arm"] == arm]
                    _, tokens, _, first, worst, _ = cells(own, static)
                    row = (f"{times:g}", arm, tokens, first, worst)
                    found.setdefault(f"{load}, {kind}", []).append(row)
    return found


def cells(runs: list[Run], static: dict[int, Run]) -> tuple[str, ...]:
    """Return what an arm's runs came to, beside static parts with the same requests."""
    tokens = [run["tokens_per_second"] for run in runs]
    first = [run["first_token"]["p90"] for run in runs]
    beside = [static[run["seed"]] for run in runs]
    return (
        f"{statistics.mean(tokens):,.0f}",
        _times(a / b["tokens_per_second"] for a, b in zip(tokens, beside, strict=True)),
        f"{statistics.mean(first):.1f} s",
        _times(a / b["first_token"]["p90"] for a, b in zip(first, beside, strict=True)),
        _times(_worst(run, other) for run, other in zip(runs, beside, strict=True)),
        f"{statistics.mean(run['moves'] for run in runs):,.0f}",
    )


def _worst(run: Run, other: Run) -> float:
    """Return the largest ratio of a model's time to the first token."""
    ratios: list[float] = [
        run["models"][name]["first_token"]["p90"] / other["models"][name]["first_token"]["p90"]
        for name in run["models"]
    ]
    return max(ratios)


def _times(ratios: Iterable[float]) -> str:
    """Return the mean of ratios."""
    return f"{statistics.geometric_mean(list(ratios)):.2f}"
