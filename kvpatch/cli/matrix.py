"""``kvpatch matrix``: what is validated on every release of vLLM, from the recorded results."""

from __future__ import annotations

import argparse
import json
import shlex
from contextlib import suppress
from itertools import chain

from packaging.version import InvalidVersion

from kvpatch import distributions, gate, patches, supported
from kvpatch import verdicts as verdicts_here
from kvpatch.cli.columns import columns
from kvpatch.matrix import tables, verdicts
from kvpatch.matrix.verdicts import Matrix, Verdict
from kvpatch.versions import Installed

LEGEND = (
    f"{tables.ALL} validated, {tables.PART} in part, {tables.REFUSED} refused, "
    f"{tables.ABSENT} not in this release; of full attention and sliding windows.\n"
    "Model runners, other models, options and reasons: kvpatch matrix --vllm RELEASE"
)

RANKS = (
    "with tensor parallelism: full attention and sliding windows, with any number of ranks, where "
    "they are validated above by themselves; other models where a line above has 2 ranks; with "
    "another setting, fp8 for one, only where the pair is below (else KVP376)"
)
TOGETHER = (
    "settings that start together, by connector; three where each pair of them does (KVP376); host "
    "pool, idle and first limit are KVPATCH_HOST_POOL, KVPATCH_IDLE and KVPATCH_FIRST_LIMIT:"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", action="store_true", help="print every cell as JSON")
    parser.add_argument("--vllm", metavar="RELEASE", help="every cell of one release")
    parser.add_argument("--rows", action="store_true", help="the outcome of each patch instead")
    parser.epilog = (
        "Without options: one line per release. Exit status 2: the release was not inspected."
    )


def run(options: argparse.Namespace) -> int:
    """Print the matrix; return the exit code."""
    matrix = verdicts.read()
    vllm = None if options.vllm is None else release(options.vllm, matrix.releases)
    if vllm == "":
        why_not = (
            f"vLLM {options.vllm} is not known to this kvpatch, and does not start "
            f"(KVP107); stay on vLLM {supported.in_ranges(supported.validated())}, or read "
            "docs/support-policy.md on how one may be tried"
        )
        print(json.dumps({"error": why_not}) if options.json else why_not)
        return 2
    if options.rows:
        print(rows([vllm] if vllm else matrix.releases, options.json))
    elif options.json:
        print(as_json(matrix.of(vllm) if vllm else matrix))
    elif vllm:
        print(one_release(matrix.of(vllm), vllm))
    else:
        print(every_release(matrix))
    return 0


def release(text: str, releases: list[str]) -> str:
    """Return the release that a version is, as the gate reads it; empty if it is none."""
    with suppress(InvalidVersion):
        found = Installed.release("vllm", text)
        return next((one for one in releases if found.is_one_of([one])), "")
    return ""


def as_json(matrix: Matrix) -> str:
    """Return every cell."""

    def words(verdict: Verdict) -> dict[str, str]:
        said = {"verdict": verdict.kind.value, "why": verdict.why}
        more = {"tagged bytes": verdict.tagged, "plain vLLM on a CPU": verdict.ended}
        return said | {name: text for name, text in more.items() if text}

    cells = [vars(cell) | words(verdict) for cell, verdict in matrix.cells.items()]
    on_npus = [
        {"vllm-ascend": ascend} | vars(cell) | words(verdict)
        for (ascend, cell), verdict in matrix.npus.items()
    ]
    counted = verdicts.counts(matrix.cells.values())
    return json.dumps({"counts": counted, "cells": cells, "NPUs": on_npus}, indent=1)


def every_release(matrix: Matrix) -> str:
    """Return one line per release, and the counts for the whole matrix."""
    grid = tables.grid(matrix.cells, reversed(matrix.releases))
    releases = columns([("vLLM", *verdicts.CONNECTORS), *grid])
    return "\n\n".join((releases, LEGEND, on_npus(matrix), counts(matrix) + verified()))


def on_npus(matrix: Matrix) -> str:
    """Return a line per release of vllm-ascend and connector."""
    return columns(
        [
            (f"vllm-ascend {ascend} on an NPU", cell.connector, verdict.kind.value)
            for (ascend, cell), verdict in matrix.npus.items()
        ]
    )


def verified() -> str:
    """Return a line per verdict of ``kvpatch verify`` that is found here; none without."""
    lines = [
        (
            one.date,
            one.word,
            f"vLLM {one.combination['versions']['vllm']}",
            str(one.combination["device"]),
            shlex.join(one.command),
        )
        for one in sorted(verdicts_here.every(), key=lambda one: one.date)
    ]
    return f"\n\nverified here\n{columns(lines)}" if lines else ""


def one_release(matrix: Matrix, vllm: str) -> str:
    """Return every cell of a release, grouped by verdict."""
    parts = []
    for verdict, cells in tables.grouped(matrix.cells):
        parts.append(f"{verdict.kind.value}: {verdict.why}")
        if verdict.tagged:
            parts.append(f"  tagged bytes were right: {verdict.tagged}")
        if verdict.ended:
            parts.append(f"  plain vLLM, without kvpatch, ends on a CPU: {verdict.ended}")
        parts += [f"    {line}" for line in tables.describe(cells)]
    parts.append(RANKS)
    parts.append(TOGETHER)
    for name, by_connector in matrix.tried.items():
        who = [one for one, releases in by_connector.items() if vllm in chain(*releases)]
        parts += [f"    {name}: {', '.join(who)}"] if who else []
    for (ascend, cell), verdict in matrix.npus.items():
        parts.append(f"vllm-ascend {ascend} on an NPU: {verdict.kind.value}: {verdict.why}")
        parts.append(f"    {cell.connector}, {cell.runner}, {cell.layout}, {cell.model}")
    return "\n".join([*parts, "", counts(matrix)])


def counts(matrix: Matrix) -> str:
    """Return how many cells have each verdict, a line each."""
    counted = verdicts.counts(matrix.cells.values())
    width = len(str(max(counted.values(), default=0)))
    each = (f"  {count:>{width}} {kind}" for kind, count in counted.items())
    return "\n".join([f"{sum(counted.values())} cells:", *each])


def rows(releases: list[str], in_json: bool) -> str:
    """Return the outcome of each patch in each release: by its range and what is validated."""
    outcomes = {
        patch.id: {release: gate.by_range(feature, patch, release) for release in releases}
        for feature in patches.FEATURES
        for patch in feature.patches
    }
    if in_json:
        by_release = {
            release: {
                row: {"outcome": of[release].outcome.value, "reason": of[release].reason}
                for row, of in outcomes.items()
            }
            for release in releases
        }
        return json.dumps(by_release, indent=1)
    lines = ((row, *(one.outcome.value for one in of.values())) for row, of in outcomes.items())
    table = columns([("patch", *releases), *lines])
    return "\n\n".join(
        [table]
        + [f"{one} is not installed, and its patches not listed" for one in distributions.absent()]
    )
