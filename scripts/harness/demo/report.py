"""The HTML report: one self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from harness.console import Row
from harness.demo.conversations import Answer
from harness.demo.meter import Sample
from harness.figures import BLUE, GRAY, GREEN, ORANGE, svg
from harness.markdown import render

_MIB = 1 << 20


@dataclass(frozen=True)
class Content:
    """Everything the report shows."""

    failures: Sequence[str]
    rows: Sequence[Row]
    environment: Sequence[Row]
    samples: Sequence[Sample]
    phases: Sequence[tuple[float, str]]
    static_bytes: int
    plain: Sequence[Answer]
    ours: Sequence[Answer]
    status_lines: Sequence[str]


def write(content: Content, folder: Path) -> Path:
    """Write ``index.html`` into ``folder`` and return its path."""
    path = folder / "index.html"
    plots = {"memory": _svg(memory_plot(content)), "ttft": _svg(ttft_plot(content))}
    path.write_text(render("report.html", content=content, **plots), encoding="utf-8")
    return path


def memory_plot(content: Content) -> Figure:
    """Mapped device memory over time, with what happened when."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    axes = figure.subplots()
    seconds = [sample.seconds for sample in content.samples]
    mapped = [sample.mapped / _MIB for sample in content.samples]
    resident = [sample.resident / _MIB for sample in content.samples]
    static = content.static_bytes / _MIB
    top = max([*mapped, static, 1]) * 1.3
    end = seconds[-1] if seconds else 1
    axes.fill_between(seconds, mapped, step="post", color=BLUE, alpha=0.1, linewidth=0)
    axes.step(
        seconds, resident, where="post", color=GREEN, linewidth=5, alpha=0.3, label="resident"
    )
    axes.step(seconds, mapped, where="post", color=BLUE, linewidth=1.6, label="mapped by kvcached")
    axes.axhline(
        static,
        color=GRAY,
        linestyle="--",
        linewidth=1.4,
        label="plain vLLM's KV cache, allocated permanently",
    )
    bounds = [at for at, _ in content.phases] + [end]
    for number, (begin, name) in enumerate(content.phases):
        if number % 2:
            axes.axvspan(begin, bounds[number + 1], color="#f1f4f9", zorder=0, linewidth=0)
        middle = (begin + bounds[number + 1]) / 2
        axes.text(middle, top * 0.97, name, ha="center", va="top", fontsize=9, color="#5b6678")
    axes.set(xlim=(0, end), ylim=(0, top), xlabel="seconds", ylabel="MiB of device memory")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    return figure


def ttft_plot(content: Content) -> Figure:
    """Time to the first token against the length of the prompt."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    axes = figure.subplots()

    cold = [answer for answer in (*content.plain, *content.ours) if not answer.returning]
    plain, ours = (
        [answer for answer in answers if answer.returning]
        for answers in (content.plain, content.ours)
    )
    for answers, color, marker, label in (
        (cold, GRAY, "D", "cold: first turn, both servers"),
        (plain, ORANGE, "s", "returning, plain vLLM (recomputed)"),
        (ours, BLUE, "o", "returning, kvpatch (from the CPU tier)"),
    ):
        axes.scatter(
            [len(answer.prompt) for answer in answers],
            [answer.ttft * 1000 for answer in answers],
            color=color,
            marker=marker,
            s=42,
            alpha=0.9,
            linewidth=0,
            label=label,
        )
    axes.set_ylim(bottom=0)
    axes.set(xlabel="prompt tokens", ylabel="ms to the first token")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    return figure


def _svg(figure: Figure) -> str:
    text = svg(figure)
    return text[text.index("<svg") :]
