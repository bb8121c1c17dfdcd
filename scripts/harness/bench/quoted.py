"""The figures that README.md and docs/index.md quote, from the result files alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from harness import markdown
from harness.bench import arms, pairing, two_models

markdown.TEMPLATES.filters["median"] = statistics.median

RATE = "total_tokens_per_second"
# A figure in words, its load, the arm that kvpatch's is compared with, and where it is in a run.
FIGURES = (
    (
        "multi-turn conversations that return after eviction, tokens/s against kvcached without "
        "offloading",
        "conversations",
        arms.KVCACHED,
        RATE,
    ),
    (
        "prompts without reuse, tokens/s against plain vLLM: the cost of elastic memory and of "
        "storing",
        "no reuse",
        arms.PLAIN,
        RATE,
    ),
)
PLAIN, STATIC, KEEPING, KVCACHED, KVPATCH = (one.name for one in two_models.ALL)
# Two models, by their names in the result file and in README.md.
SHARED = {
    PLAIN: "plain vLLM, static halves",
    STATIC: "vLLM + offloading, static halves",
    KVCACHED: "kvcached alone",
    KVPATCH: "kvcached + kvpatch",
}


def sections(found: dict[str, Any]) -> dict[str, str]:
    """Return sections by the names of their markers: the first, of two models, is in both pages.

    Args:
        found: the result files, as ``page.read`` returns them.
    """
    host, startup = found["host"], found["startup"]
    cycles = host["two_models"]["cycles"]
    return {
        "numbers": markdown.render("readme-numbers.md", cycles=cycles, arms=SHARED),
        "measured": markdown.render("readme-measured.md", host=host, keeping=cycles[KEEPING]),
        "results": markdown.render("readme-results.md", rows=list(_rows(found)), startup=startup),
    }


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    host = found["host"]
    for words, load, against, path in FIGURES:
        ratio = pairing.compared(host["one_model"], load, arms.KVPATCH, against, path)
        yield words, f"{ratio}, noise {pairing.noise(host['one_model'], load, path):.1%}"
    yield eight_models(found["sharing"])[:2]
    if "engines" in found["sharing"]:
        yield _served(found["sharing"]["engines"])


def _served(engines: dict[str, Any]) -> tuple[str, str]:
    """Return the row of eight served engines: their speed, and what they had to compute."""
    static, lending = engines["arms"].values()
    computed = [
        one["prompt_tokens"]["computed"] / sum(one["prompt_tokens"].values())
        for one in (lending, static)
    ]
    return (
        f"the same of {engines['setting']['models']} small served engines on the host device, once",
        f"{static['seconds'] / lending['seconds']:.2f}x, {computed[0]:.0%} of prompt tokens "
        f"computed in place of {computed[1]:.0%} (what that depends on: docs/numbers.md)",
    )


def eight_models(sharing: dict[str, Any]) -> tuple[str, str, str]:
    """Return a load of many models: what it is, with kvpatch, and the best there is."""
    setting, rows = sharing["models"]["setting"], sharing["models"]["rows"]
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for one in rows:
        by_arm.setdefault(one["arm"], []).append(one)
    said = {
        arm: " and ".join(f"{one['tokens_over_static']:.2f}x" for one in found)
        for arm, found in by_arm.items()
    }
    lending = by_arm["kvpatch balance --lend '*'"]
    return (
        f"tokens/s of {setting['models']} models, {setting['busy']} busy on average, on the memory "
        "of three, over static parts, simulated",
        f"`balance` {said[lending[0]['arm']]} with "
        + " and ".join(f"{one['p90_over_static']:.2f}x" for one in lending)
        + " the P90 of the first token",
        f"first come, first served {said['first come']}; one LRU over all {said['one LRU']}",
    )
