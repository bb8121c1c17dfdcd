"""The HTML report: one self-contained file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from harness.bench import plots
from harness.console import Row
from harness.demo.conversations import QUESTIONS, Answer, Conversation
from harness.demo.servers import Device
from harness.figures import BLUE, GRAY, GREEN, svg
from harness.markdown import render

# Where the tokens of a prompt come from, by the names that a run's counters have.
SOURCES = {
    "computed": "computed again",
    "from_cache": "still on the device",
    "from_tier": "from the CPU tier",
}


@dataclass(frozen=True)
class Said:
    """A question of a conversation, and its answer."""

    page: str
    question: str
    answer: str


@dataclass(frozen=True)
class Content:
    """Everything the report shows.

    Attributes:
        failures: of the verdict.
        rows, environment: the tables.
        device: that the models share.
        cycles: what the picture is drawn from, by its title.
        returned: the counters while conversations returned, by way.
        said: some of what was said, where it is text.
        status_lines: of the servers with kvpatch.
    """

    failures: Sequence[str]
    rows: Sequence[Row]
    environment: Sequence[Row]
    device: Device
    cycles: Mapping[str, dict[str, Any]]
    returned: Mapping[str, Mapping[str, int]]
    said: Sequence[Said]
    status_lines: Sequence[str]


def write(content: Content, folder: Path) -> Path:
    """Write ``index.html`` into ``folder`` and return its path."""
    path = folder / "index.html"
    cycles = {title: [cycle] for title, cycle in content.cycles.items()}
    device = plots.shared_device({"device_bytes": content.device.size, "cycles": cycles})
    pictures = {"device": _svg(device), "returning": _svg(returning_plot(content))}
    path.write_text(render("report.html", content=content, **pictures), encoding="utf-8")
    return path


def said(answers: Sequence[Answer], conversations: Sequence[Conversation]) -> list[Said]:
    """Return what was answered in these conversations."""
    pages = {one.number: one.passage.strip().partition("\n")[0] for one in conversations}
    return [
        Said(
            pages[one.conversation],
            QUESTIONS[one.turn - 1],
            one.text.strip() + ("" if one.ended else " ..."),
        )
        for one in answers
        if one.conversation in pages
    ]


def returning_plot(content: Content) -> Figure:
    """Where the tokens of returning prompts came from.

    Not how long each took: on a machine that does something else, that is a picture of what.
    """
    figure = Figure(figsize=(10, 2.4), layout="constrained")
    axes = figure.subplots()
    ways = list(content.returned)
    before = [0] * len(ways)
    for (source, label), color in zip(SOURCES.items(), (GRAY, GREEN, BLUE), strict=True):
        tokens = [counted[source] for counted in content.returned.values()]
        axes.barh(ways, tokens, 0.55, left=before, color=color, label=label)
        before = [sum(pair) for pair in zip(before, tokens, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="tokens of returning prompts")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    return figure


def _svg(figure: Figure) -> str:
    text = svg(figure)
    return text[text.index("<svg") :]
