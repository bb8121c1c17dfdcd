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
        "results": markdown.render("readme-results.md", rows=list(_rows(host)), startup=startup),
    }


def _rows(host: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for words, load, against, path in FIGURES:
        found = pairing.compared(host, load, arms.KVPATCH, against, path)
        yield words, f"{found}, noise {pairing.noise(host, load, path):.1%}"
