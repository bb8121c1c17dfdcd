"""The plots of docs/numbers.md: the same bytes for the same results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.bench.goals import value
from harness.figures import BLUE, GRAY, GREEN, ORANGE

MIB = 1 << 20
COLORS = (GRAY, "#5b6678", GREEN, BLUE, "#93b4f7", ORANGE, "#a855f7")


def rates(one_model: dict[str, Any]) -> Figure:
    """Total tokens per second of every arm on every load, with minimum and maximum."""
    return _bars(one_model, "total_tokens_per_second", "tokens per second", logarithmic=False)


def first_tokens(one_model: dict[str, Any]) -> Figure:
    """Median time to the first token of every arm on every load."""
    return _bars(one_model, "ttft_ms.p50", "TTFT in ms, median", logarithmic=True)


def _bars(one_model: dict[str, Any], path: str, label: str, logarithmic: bool) -> Figure:
    loads, arms = list(one_model["loads"]), list(one_model["arms"])
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes: Axes = figure.subplots()
    width = 0.8 / len(arms)
    for at, arm in enumerate(arms):
        runs = [one_model["loads"][load]["runs"][arm] for load in loads]
        values = [[value(run, path) for run in rows] for rows in runs]
        middles = [statistics.median(rows) for rows in values]
        axes.bar(
            [number + at * width - 0.4 + width / 2 for number in range(len(loads))],
            middles,
            width * 0.9,
            yerr=[
                [middle - min(rows) for middle, rows in zip(middles, values, strict=True)],
                [max(rows) - middle for middle, rows in zip(middles, values, strict=True)],
            ],
            error_kw={"linewidth": 0.9, "ecolor": "#3d4757"},
            color=COLORS[at % len(COLORS)],
            label=arm,
        )
    axes.set_xticks(range(len(loads)), loads)
    axes.set_ylabel(label)
    if logarithmic:
        axes.set_yscale("log")
    axes.grid(axis="x", visible=False)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    return figure


def shared_device(two_models: dict[str, Any]) -> Figure:
    """What each of two models has mapped while their peaks take turns, arm by arm."""
    timelines = {
        name: cycles[0]["timeline"] for name, cycles in two_models["cycles"].items() if cycles
    }
    figure = Figure(figsize=(10, 1.9 * max(1, len(timelines))), layout="constrained")
    rows: Sequence[Axes] = figure.subplots(max(1, len(timelines)), squeeze=False)[:, 0]
    whole = two_models["device_bytes"] / MIB
    for axes, (name, timeline) in zip(rows, timelines.items(), strict=False):
        seconds = timeline["seconds"]
        for color, model in ((BLUE, "first"), (ORANGE, "second")):
            mapped = [size / MIB for size in timeline["mapped"][model]]
            axes.step(seconds, mapped, where="post", color=color, linewidth=1.6)
        bounds = [*(at for at, _ in timeline["phases"]), seconds[-1]]
        for at, (begin, phase) in enumerate(timeline["phases"][:-1]):
            axes.axvline(begin, color="#e6e9ef", linewidth=1)
            axes.text(
                (begin + bounds[at + 1]) / 2,
                whole * 1.02,
                phase.replace("_", " "),
                ha="center",
                va="bottom",
                fontsize=8,
                color="#5b6678",
            )
        axes.set(xlim=(0, seconds[-1]), ylim=(0, whole * 1.18), ylabel="MiB mapped")
        axes.set_title(name, loc="left", fontsize=9, pad=3)
    rows[-1].set_xlabel("seconds; blue is the first model, orange the second")
    return figure


def growth(series: dict[str, list[tuple[float, float]]], label: str) -> Figure:
    """The cost of each part by its size, on logarithmic scales.

    Args:
        series: by name, (how many, seconds).
        label: of the size.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes: Axes = figure.subplots()
    for at, (name, points) in enumerate(series.items()):
        color = COLORS[at % len(COLORS)]
        axes.plot(
            [many for many, _ in points],
            [seconds * 1e6 for _, seconds in points],
            marker="o",
            markersize=4,
            color=color,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="microseconds, median")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    return figure
