"""docs/numbers.md and its plot, from the result files alone."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness import markdown
from harness.bench import arms, goals, plots, pool_goals, reports, suspension_goals
from harness.bench.goals import NO_GPU, NOT_RUN, Results, compared, shown, value
from harness.figures import svg

Runs = list[dict[str, Any]]

PICTURES = "docs/pictures"
FILES = ("host", "fence", "pool", "suspend", "micro", "startup", "sharing", "gpu")


def read(results: Path) -> dict[str, Any]:
    """Return the result files by name, None for those that are not there.

    Raises:
        SystemExit: one of them is not JSON, or is of the host device in the place of a GPU.
    """
    found: dict[str, Any] = dict.fromkeys(FILES)
    for name in FILES:
        path = results / f"{name}.json"
        if path.exists():
            try:
                found[name] = json.loads(path.read_text())
            except ValueError as error:
                raise SystemExit(f"{path.name} is not JSON ({error})") from error
            if name == "gpu" and found[name]["machine"]["gpu"] == "none":
                raise SystemExit(f"{path.name} is of the host device, not of a GPU; take it out")
    return found


def render(results: Path) -> dict[str, str]:
    """Return every file of the page by its path, from the result files in a folder."""
    found = read(results)
    host = found["host"] or {}
    one_model, two_models = host.get("one_model"), host.get("two_models")
    series = growth_series(found["micro"] or {"rows": []})
    figures = {}
    if two_models:
        figures["shared-device"] = plots.shared_device(two_models)
    made = {f"{PICTURES}/numbers-{name}.svg": svg(figure) for name, figure in figures.items()}
    made["docs/numbers.md"] = markdown.render(
        "numbers.md",
        **found,
        one_model=one_model,
        two_models=two_models,
        verdicts=goals.verdicts(Results(found["host"], found["gpu"])),
        pool_rows=list(pool_goals.rows(found["pool"] or {})),
        pool_runs=list(reports.runs(found["pool"] or {})),
        suspend_rows=list(suspension_goals.rows(found["suspend"] or {})),
        suspend_runs=list(reports.runs(found["suspend"] or {})),
        sharing_runs=list(reports.runs(found["sharing"] or {})),
        series=series,
        pairs=pairs,
        no_gpu=NO_GPU,
        not_run=NOT_RUN,
    )
    return made


def median(runs: Iterable[dict[str, Any]], path: str) -> float:
    """Return the median over the repeats of a figure, as in ``ttft_ms.mean``."""
    return statistics.median(value(run, path) for run in runs)


def share_of_prompts(runs: Runs, source: str) -> str:
    """Return the share of the prompts' tokens that has a source, or a dash without tokens."""
    sources = ("computed", "from_cache", "from_tier")
    tokens = {name: median(runs, f"prompt_tokens.{name}") for name in sources}
    whole = sum(tokens.values())
    return f"{tokens[source] / whole:.1%}" if whole else "-"


def copied(runs: Runs, way: str) -> str:
    """Return what was stored or loaded, and its GB/s, or a dash when nothing was timed."""
    size, seconds = median(runs, f"bytes.{way}"), median(runs, f"copy_seconds.{way}")
    rate = f"{size / seconds / 1e9:.2f}" if seconds > 0 and size > 0 else "-"
    return f"{mib(size)}, {rate}"


def copies_per_block(runs: Runs) -> str:
    """Return how many copies a block takes, or a dash when none was copied."""
    blocks = sum(run["copies"]["blocks"] for run in runs)
    return f"{sum(run['copies']['copies'] for run in runs) / blocks:.2f}" if blocks else "-"


def preempted(cycles: Runs) -> str:
    """Return the requests that were preempted in a cycle, the median."""
    phases = [cycle["phases"].values() for cycle in cycles]
    return f"{statistics.median(sum(one['preemptions'] for one in cycle) for cycle in phases):.0f}"


PAIRS = (
    (arms.STATIC, arms.PLAIN),
    (arms.KVPATCH, arms.PLAIN),
    (arms.KVPATCH, arms.KVCACHED),
    (arms.KVPATCH, arms.STATIC),
    (arms.EAGER, arms.KVCACHED),
    (arms.LAZY, arms.KVCACHED),
    (arms.EAGER, arms.KVPATCH),
    (arms.LAZY, arms.KVPATCH),
    (arms.TWIN, arms.KVPATCH),
)


def pairs(host: dict[str, Any], load: str) -> Iterator[list[str]]:
    """Yield the cells of each pair of arms that ran a load."""
    for first, second in PAIRS:
        figures = [
            compared(host, load, first.name, second.name, path)
            for path in ("total_tokens_per_second", "ttft_ms.mean", "tpot_ms.mean", "cpu_seconds")
        ]
        name = f"{first.name} / {second.name}" + (" (the noise)" if first.twin else "")
        if all(figures):
            yield [name, *(shown(figure) for figure in figures if figure)]


def mib(size: float) -> str:
    """Return bytes in MiB."""
    return f"{size / (1 << 20):,.0f} MiB"


def three(values: Iterable[dict[str, float] | None]) -> str:
    """Return mean / P50 / P99, each the median over the repeats."""
    given = [value for value in values if value]
    if not given:
        return "-"
    return " / ".join(
        f"{statistics.median(value[name] for value in given):,.1f}"
        for name in ("mean", "p50", "p99")
    )


def growth_series(micro: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return (how many, seconds) of each part of ``micro.json`` that was run in sizes."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in micro["rows"]:
        series.setdefault(row["name"], []).append((row["many"], row["median_s"]))
    return {name: sorted(points) for name, points in series.items() if len(points) > 1}


def exponent(points: list[tuple[float, float]]) -> float:
    """Return the power with which cost grows between the two largest sizes: 1 is linear."""
    (few, fast), (many, slow) = points[-2:]
    return math.log(slow / fast) / math.log(many / few)


def duration(seconds: float) -> str:
    """Return a short time in its unit."""
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} µs"


# What docs/numbers.md calls in its template.
FILTERS = (
    *(median, share_of_prompts, copied, copies_per_block, preempted),
    *(mib, three, exponent, duration),
)
markdown.TEMPLATES.filters.update({one.__name__: one for one in FILTERS})
