"""docs/numbers.md and its plot, from the result files alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness import markdown
from harness.bench import arms, pairing, plots, steps_goals, two_models
from harness.bench.loads import RATE as RATE_OF_ANSWERS
from harness.bench.quoted import RATE, eight_models
from harness.figures import svg

Result = dict[str, Any]

PICTURE = "docs/pictures/numbers-shared-device.svg"
SHOWN = ("host", "sharing", "suspend")
FILES = (*SHOWN, "steps", "startup", "gpu")


class Figure(NamedTuple):
    """A row of the page: what was measured, and what it can be at best or is without kvpatch."""

    what: str
    measured: str
    beside: str
    file: str


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
    page = markdown.render(
        "numbers.md",
        gpu=found["gpu"],
        figures=list(figures(found)),
        steps=found["steps"],
        steps_rows=list(steps_goals.rows(found["steps"] or {})),
        sharing_rows=list(steps_goals.sharing_rows(found["sharing"])) if found["sharing"] else [],
        engines=(found["sharing"] or {}).get("engines"),
        limit=(found["suspend"] or {}).get("limit"),
        runs=[one for name in SHOWN if found[name] for one in runs(name, found[name])],
    )
    return {
        "docs/numbers.md": page,
        PICTURE: svg(plots.shared_device(found["host"]["two_models"])),
    }


def runs(name: str, report: Result) -> Iterator[tuple[str, Result]]:
    """Yield the parts of a result file that were measured in one run, and what that run was."""
    parts: dict[str, tuple[list[str], Result]] = {}
    for part, run in report.get("runs", {}).items():
        parts.setdefault(json.dumps(run), ([], run))[0].append(part)
    for of, run in parts.values() or [([], report)]:
        yield ", ".join([f"[{name}.json](results/{name}.json)", *of]), run


def figures(found: dict[str, Any]) -> Iterator[Figure]:
    """Yield the figures of the page, those whose result file is there."""
    for file, of in (
        ("host", _one_model),
        ("host", _two_models),
        ("host", _answers),
        ("sharing", _host_pool),
        ("sharing", lambda sharing: [eight_models(sharing)]),
        ("suspend", _suspensions),
    ):
        if found[file] is not None:
            for row in of(found[file]):
                yield Figure(*row, file)


Rows = Iterator[tuple[str, str, str]]


def _one_model(host: Result) -> Rows:
    ours, alone, one = arms.KVPATCH, arms.KVCACHED, host["one_model"]
    for load, what in (
        ("conversations", "conversations that return after their eviction"),
        ("no reuse", "prompts without reuse, which only cost"),
    ):
        static = pairing.compared(one, load, arms.STATIC, arms.PLAIN, RATE)
        yield (
            f"tokens/s with offloading over without, {what}",
            f"{pairing.compared(one, load, ours, alone, RATE)}; equal arms differ by "
            f"{pairing.noise(one, load, RATE):.1%} at most",
            f"vLLM on static memory: {static}",
        )
    loads = host["one_model"]["loads"]
    returned = loads["conversations"]["runs"]
    again = {arm: computed_again(returned[arm.name]) for arm in (ours, arms.STATIC, alone)}
    yield (
        "the conversations' prompt tokens that are computed again",
        again[ours],
        f"vLLM + offloading on static memory: {again[arms.STATIC]}; kvcached alone: {again[alone]}",
    )
    yield (
        "copies for each block that is stored or loaded, contiguous layout",
        copies_per_block(host, ours),
        f"vLLM + offloading on static memory, a copy for each layer: "
        f"{copies_per_block(host, arms.STATIC)}",
    )


def _answers(host: Result) -> Rows:
    if (part := host.get("answers")) is None:
        return
    (load,) = part["loads"]

    def said(figure: str, first: arms.Arm, second: arms.Arm) -> str:
        return str(pairing.compared(part, load, first, second, f"itl_ms.{figure}"))

    of_equal = (pairing.noise(part, load, f"itl_ms.{one}") for one in ("p50", "p99"))
    noise = " and ".join(f"{one:.1%}" for one in of_equal)

    def both(first: arms.Arm, second: arms.Arm) -> str:
        return " and ".join(said(one, first, second) for one in ("p50", "p99"))

    yield (
        "time between two tokens, P50 and P99, over vLLM's with OffloadingConnector on static "
        f"memory; {part['size']['asked']} requests at {RATE_OF_ANSWERS:g} a second, answers of "
        f"{part['size']['long_answer']} tokens",
        f"{both(arms.KVPATCH, arms.STATIC)}; with SimpleCPUOffloadConnector "
        f"{both(arms.SIMPLE, arms.STATIC)}; equal arms differ by {noise} at most",
        f"plain vLLM, which stores nothing: {both(arms.PLAIN, arms.STATIC)}",
    )


def computed_again(runs: list[Result]) -> str:
    """Return the share of the prompts' tokens that was in no cache, the median over the repeats."""
    shares = [one["prompt_tokens"]["computed"] / sum(one["prompt_tokens"].values()) for one in runs]
    return f"{statistics.median(shares):.1%}"


def copies_per_block(host: Result, arm: arms.Arm) -> str:
    """Return how many copies a block takes, over every load."""
    counted = [
        run["copies"]
        for load in host["one_model"]["loads"].values()
        for run in load["runs"][arm.name]
    ]
    blocks = sum(one["blocks"] for one in counted)
    return f"{sum(one['copies'] for one in counted) / blocks:.2f} over {blocks:,} blocks"


def _two_models(host: Result) -> Rows:
    every = host["two_models"]["cycles"]
    static, _, alone, ours = (one.name for one in two_models.ALL[1:])
    for name, what in (
        ("given_share", "of what the idle one of two models used, the neighbour's at its peak"),
        ("served_share", "of its returning prompts' tokens, those that hit afterwards"),
    ):
        # The worst cycle counts: a neighbour that did not fit once did not fit.
        worst = {arm: f"{min(cycle[name] for cycle in every[arm]):.1%}" for arm in every}
        yield (
            what,
            f"{worst[ours]} in the worst of {len(every[ours])} cycles",
            f"static halves + offloading: {worst[static]}; kvcached alone: {worst[alone]}",
        )


def _host_pool(sharing: Result) -> Rows:
    pool = sharing["pool"]
    ideal = [one["one_lru_over_halves"] for one in pool["rows"]]
    yield (
        f"blocks found by two engines in one host pool over fixed halves, {len(ideal)} pairs of "
        "traces and turns, simulated",
        f"{pool['over_halves']['mean']:.2f}x, {pool['over_halves']['least']:.2f}x at least",
        f"one LRU over all blocks: {statistics.mean(ideal):.2f}x, {min(ideal):.2f}x at least",
    )


def _suspensions(suspend: Result) -> Rows:
    rounds = [one for kind in suspend["suspend"].values() for one in kind["rounds"]]
    yield (
        f"{len(rounds)} suspensions, of three connectors: pages back, and tokens served after "
        "the resumption",
        f"{min(one['given_back'] for one in rounds):.0%} and "
        f"{min(one['served'] for one in rounds):.0%} at least; "
        f"{sum(one['wrong_tokens'] for one in rounds)} wrong tokens",
        "100% and 100%",
    )
