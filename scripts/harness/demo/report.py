"""The HTML report: one self-contained file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from harness.console import Row
from harness.demo.conversations import Answer
from harness.demo.meter import Sample
from harness.figures import BLUE, GRAY, GREEN, ORANGE, svg

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
    path.write_text(page(content), encoding="utf-8")
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
        seconds,
        resident,
        where="post",
        color=GREEN,
        linewidth=5,
        alpha=0.3,
        label="resident",
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

    def draw(answers: Sequence[Answer], color: str, marker: str, label: str) -> None:
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

    cold = [answer for answer in (*content.plain, *content.ours) if not answer.returning]
    draw(cold, GRAY, "D", "cold: first turn, both servers")
    draw(
        [answer for answer in content.plain if answer.returning],
        ORANGE,
        "s",
        "returning, plain vLLM (recomputed)",
    )
    draw(
        [answer for answer in content.ours if answer.returning],
        BLUE,
        "o",
        "returning, kvpatch (from the CPU tier)",
    )
    axes.set_ylim(bottom=0)
    axes.set(xlabel="prompt tokens", ylabel="ms to the first token")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    return figure


def page(content: Content) -> str:
    """Return the whole page."""
    passed = not content.failures
    verdict = "Passed" if passed else "Failed"
    sentences = content.failures or [
        "All tokens equal plain vLLM's, and returning conversations were loaded from the CPU tier."
    ]
    return _PAGE.format(
        verdict=verdict,
        state="pass" if passed else "fail",
        sentences="".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences),
        cards="".join(_card(row) for row in content.rows[:4]),
        memory=_svg(memory_plot(content)),
        ttft=_svg(ttft_plot(content)),
        rows=_rows(content.rows),
        environment=_rows(content.environment),
        status=html.escape("\n".join(content.status_lines)) or "none",
    )


def _card(row: Row) -> str:
    name, value, note = html.escape(row.name), html.escape(row.value), html.escape(row.note)
    return f"<div class=card><b>{value}</b><span>{name}</span><small>{note}</small></div>"


def _rows(rows: Sequence[Row]) -> str:
    return "".join(
        f"<tr><th>{html.escape(row.name)}</th><td>{html.escape(row.value)}</td>"
        f"<td class=note>{html.escape(row.note)}</td></tr>"
        for row in rows
    )


def _svg(figure: Figure) -> str:
    text = svg(figure)
    return text[text.index("<svg") :]


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvpatch demo: {verdict}</title>
<style>
  :root {{ color-scheme: light; }}
  body {{ font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
    color: #1d2430; background: #f6f7fa; margin: 0; padding: 2.5rem 1rem 4rem; }}
  main {{ max-width: 62rem; margin: 0 auto; }}
  h1 {{ font-size: 1.65rem; margin: 0 0 .25rem; letter-spacing: -.01em; }}
  h2 {{ font-size: 1.1rem; margin: 0 0 .25rem; }}
  p {{ margin: .25rem 0; }}
  .lead, .note, figcaption {{ color: #5b6678; }}
  .banner {{ display: flex; gap: 1rem; align-items: center; border-radius: 10px;
    padding: .9rem 1.2rem; margin: 1.4rem 0; }}
  .banner b {{ font-size: 1.1rem; }}
  .pass {{ background: #e5f5ea; color: #14532d; }}
  .fail {{ background: #fdeaea; color: #7f1d1d; }}
  .cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr));
    gap: 1rem; margin-bottom: 1rem; }}
  .card, section {{ background: #fff; border: 1px solid #e3e7ee; border-radius: 10px; }}
  .card {{ padding: 1rem 1.2rem; display: flex; flex-direction: column; }}
  .card b {{ font-size: 1.25rem; letter-spacing: -.01em; }}
  .card small {{ color: #5b6678; margin-top: .2rem; }}
  section {{ padding: 1.2rem 1.4rem; margin-bottom: 1rem; }}
  figure {{ margin: .6rem 0 0; }}
  svg {{ width: 100%; height: auto; }}
  svg text {{ font-family: inherit !important; }}
  table {{ border-collapse: collapse; width: 100%; font-size: .94rem; }}
  th, td {{ text-align: left; vertical-align: top; padding: .45rem .8rem .45rem 0;
    border-top: 1px solid #edf0f4; }}
  tr:first-child > * {{ border-top: 0; }}
  th {{ font-weight: 500; width: 34%; }}
  td {{ font-variant-numeric: tabular-nums; }}
  pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font-size: .82rem; margin: .4rem 0 0;
    background: #f6f7fa; padding: .8rem; border-radius: 8px; }}
</style>
<main>
  <h1>kvpatch demo</h1>
  <p class="lead">The same conversations with plain vLLM and with vLLM on kvcached's elastic KV
  memory, where OffloadingConnector loads blocks from the CPU tier.</p>
  <div class="banner {state}"><b>{verdict}</b><div>{sentences}</div></div>
  <div class="cards">{cards}</div>
  <section>
    <h2>Device memory follows use</h2>
    <figcaption>Memory of the KV cache during the conversations, after them, and after the
    prefix cache was reset.</figcaption>
    <figure>{memory}</figure>
  </section>
  <section>
    <h2>Returning conversations are loaded, not recomputed</h2>
    <figcaption>Each point is one answer; in both KV caches a conversation is evicted before it
    returns.</figcaption>
    <figure>{ttft}</figure>
  </section>
  <section><h2>Figures</h2><table>{rows}</table></section>
  <section><h2>How it was run</h2><table>{environment}</table></section>
  <section><h2>Status lines of the kvpatch server</h2><pre>{status}</pre></section>
</main>
</html>
"""
