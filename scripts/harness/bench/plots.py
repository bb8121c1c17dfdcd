"""The plots of docs/numbers.md: the same bytes for the same results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.bench.goals import value
from harness.figures import BLUE, GRAY, GREEN, ORANGE

MIB = 1 << 20
MODELS = {BLUE: "first", ORANGE: "second"}
COLORS = (GRAY, "#5b6678", GREEN, BLUE, "#93b4f7", ORANGE, "#a855f7")


def rates(one_model: dict[str, Any]) -> Figure:
    """Total tokens per second of every arm on every load, with minimum and maximum."""
    return _bars(one_model, "total_tokens_per_second", "tokens per second, median")


def first_tokens(one_model: dict[str, Any]) -> Figure:
    """Median time to the first token of every arm on every load."""
    return _bars(one_model, "ttft_ms.p50", "time to first token, ms, median")


def _bars(one_model: dict[str, Any], path: str, label: str) -> Figure:
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
    axes.set(xlabel="load", ylabel=label)
    axes.grid(axis="x", visible=False)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    return figure


def shared_device(two_models: dict[str, Any]) -> Figure:
    """What each of two models has of a device while their peaks take turns, arm by arm.

    The first model's part grows from the bottom and the second's from the top: what is beyond
    the line in the middle is lent, and what is between them is free.
    """
    cycles = {name: cycles[0] for name, cycles in two_models["cycles"].items() if cycles}
    figure = Figure(figsize=(10, 2.2 * max(1, len(cycles))), layout="constrained")
    rows: Sequence[Axes] = figure.subplots(max(1, len(cycles)), squeeze=False)[:, 0]
    whole = two_models["device_bytes"] / MIB
    for axes, (name, cycle) in zip(rows, cycles.items(), strict=False):
        timeline = cycle["timeline"]
        seconds = timeline["seconds"]
        # Static memory is in no ledger of mapped pages: each model has its half for good.
        elastic = any(timeline["mapped"]["first"])
        static = [] if elastic else [cycle["used_bytes"]] * len(seconds)
        for (color, model), edge in zip(MODELS.items(), (0, whole), strict=True):
            sizes = [size / MIB for size in static or timeline["mapped"][model]]
            steps = [at for at, size in enumerate(sizes) if not at or size != sizes[at - 1]]
            steps.append(len(sizes) - 1)
            times = [seconds[at] for at in steps]
            ends = [abs(edge - sizes[at]) for at in steps]
            axes.fill_between(times, edge, ends, step="post", color=color, alpha=0.3, linewidth=0)
            axes.step(times, ends, where="post", color=color, linewidth=1.4)
        axes.axhline(whole / 2, color=GRAY, linestyle="--", linewidth=1)
        bounds = [*(at for at, _ in timeline["phases"]), seconds[-1]]
        for at, (begin, phase) in enumerate(timeline["phases"]):
            axes.axvline(begin, color="#c3cad6", linewidth=1)
            if phase == "end":
                continue
            axes.text(
                (begin + bounds[at + 1]) / 2,
                whole * 1.02,
                phase.replace("_", " "),
                ha="center",
                va="bottom",
                fontsize=8,
                color="#5b6678",
            )
        axes.set(xlim=(0, seconds[-1]), ylim=(0, whole * 1.14))
        axes.set(xlabel="time, s", ylabel="device, MiB")
        axes.set_title(name, loc="left", fontsize=9, pad=3)
    lines = [
        Patch(color=BLUE, alpha=0.4, label="first model's, from the bottom"),
        Patch(color=ORANGE, alpha=0.4, label="second model's, from the top"),
        Line2D([], [], color=GRAY, linestyle="--", linewidth=1, label="half of the device"),
    ]
    figure.legend(handles=lines, loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    return figure


def pool(start: dict[str, Any], share: dict[str, Any]) -> Figure:
    """The start by the tier's size, and what two engines in turns are served by what they have."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    words = {"pool": ("in a pool", GREEN), "own": ("of its own", GRAY)}
    for arm, (label, color) in words.items():
        points = sorted(
            (one["gib"], one["seconds"]) for one in start["starts"] if one["arm"] == arm
        )
        left.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, label=label)
    left.set(xlabel="CPU tier, GiB", ylabel="start of the engine, s", ylim=(0, None))
    left.legend(frameon=False, fontsize=9)
    for at, (arm, label, color) in enumerate(
        (("pool", "one pool", GREEN), ("halves", "fixed halves", GRAY))
    ):
        tokens = [one["tokens_from_tier"][arm] / 1000 for one in share.values()]
        right.bar(
            [one + at * 0.4 for one in range(len(tokens))], tokens, 0.38, color=color, label=label
        )
    names = [name.replace(" phases each", "").replace(", ", "\n") + " phases" for name in share]
    right.set_xticks([one + 0.2 for one in range(len(names))], names)
    right.set(ylabel="thousand tokens from the tier")
    right.grid(axis="x", visible=False)
    right.legend(frameon=False, fontsize=9)
    return figure


def growth(series: dict[str, list[tuple[float, float]]], label: str) -> Figure:
    """The cost of each part by its size, on logarithmic scales.

    Args:
        series: by name, (how many, seconds).
        label: of the size.
    """
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes: Axes = figure.subplots()
    # No two parts look the same: each style of line has all colors.
    axes.set_prop_cycle(cycler(linestyle=["-", "--", ":"]) * cycler(color=COLORS))
    for name, points in series.items():
        many, seconds = zip(*points, strict=True)
        axes.plot(many, [one * 1e6 for one in seconds], marker="o", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="median time, µs")
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    return figure
