"""The HTML report: one self-contained file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.bench import plots
from harness.console import Row
from harness.demo.conversations import QUESTIONS, Answer, Conversation
from harness.demo.servers import KVPATCH, PLAIN, Device, Way
from harness.demo.verdict import Held
from harness.figures import svg
from harness.markdown import render

TITLES = {
    PLAIN: "plain vLLM, with a tier or without: a static half for each, used or not",
    KVPATCH: "kvcached + kvpatch: a model that is idle lends its memory",
}


def write(folder: Path, device: Device, held: Mapping[Way, Held], **tables: Any) -> Path:
    """Write ``index.html`` into ``folder`` and return its path.

    Args:
        folder: of the report.
        device: that the models share.
        held: what each way gave.
        tables: failures, figures, environment and what was said, by the template's names.
    """
    path = folder / "index.html"
    cycles = {title: [held[way].cycle] for way, title in TITLES.items()}
    picture = svg(plots.shared_device({"device_bytes": device.size, "cycles": cycles}))
    page = render(
        "report.html",
        device=picture[picture.index("<svg") :],
        returned={way.name: one.returned for way, one in held.items()},
        status_lines=held[KVPATCH].status_lines,
        **tables,
    )
    path.write_text(page, encoding="utf-8")
    return path


def said(answers: Sequence[Answer], conversations: Sequence[Conversation]) -> list[Row]:
    """Return what was answered in these conversations: page, answer and question."""
    pages = {one.number: one.title for one in conversations}
    return [
        Row(
            pages[one.conversation],
            one.text.strip() + ("" if one.ended else " ..."),
            QUESTIONS[one.turn - 1],
        )
        for one in answers
        if one.conversation in pages
    ]
