"""The plot of docs/numbers.md: the same bytes for the same results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.figures import BLUE, GRAY, ORANGE

MIB = 1 << 20
MODELS = {BLUE: "first", ORANGE: "second"}


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
