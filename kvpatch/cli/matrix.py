"""``kvpatch matrix``: what is validated on every release of vLLM, from the recorded results."""

from __future__ import annotations

import argparse
import json
import shlex

from kvpatch import distributions
from kvpatch import verdicts as verdicts_here
from kvpatch.cli.columns import columns
from kvpatch.matrix import axes, npu, signatures, tables, verdicts

LEGEND = (
    f"{tables.ALL} validated, {tables.PART} in part, {tables.REFUSED} refused, "
    f"{tables.ABSENT} not in this release; of full attention and sliding windows.\n"
    "Model runners, other models, options and reasons: kvpatch matrix --vllm RELEASE"
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
    known = signatures.releases("vllm")
    if options.vllm not in (None, *known):
        print(f"vLLM {options.vllm} is not one of {', '.join(known)}")
        return 2
    if options.rows:
        print(rows(options.vllm, options.json))
    elif options.json:
        found = verdicts.verdicts(options.vllm)
        cells = [vars(cell) | as_json(verdict) for cell, verdict in found.items()]
        on_npus = [
            {"vllm-ascend": ascend} | vars(cell) | as_json(verdict)
            for (ascend, cell), verdict in npu.verdicts().items()
            if options.vllm in (None, cell.vllm)
        ]
        counted = {"counts": verdicts.counts(found.values()), "cells": cells, "NPUs": on_npus}
        print(json.dumps(counted, indent=1))
    elif options.vllm:
        print(one_release(options.vllm))
    else:
        print(every_release())
    return 0


def as_json(verdict: verdicts.Verdict) -> dict[str, str]:
    """Return a verdict for JSON."""
    words = {"verdict": verdict.kind.value, "why": verdict.why}
    more = {"tagged bytes": verdict.tagged, "plain vLLM on a CPU": verdict.ended}
    return words | {name: said for name, said in more.items() if said}


def every_release() -> str:
    """Return one line per release, and the counts for the whole matrix."""
    found = verdicts.verdicts()
    head = ("vLLM", *(connector.name for connector in axes.CONNECTORS))
    grid = tables.grid(found, reversed(signatures.releases("vllm")))
    parts = (columns([head, *grid]), LEGEND, on_npus(), counts(found) + verified())
    return "\n\n".join(parts)


def on_npus() -> str:
    """Return a line per release of vllm-ascend and connector."""
    return columns(
        [
            (f"vllm-ascend {ascend} on an NPU", cell.connector, verdict.kind.value)
            for (ascend, cell), verdict in npu.verdicts().items()
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


def one_release(vllm: str) -> str:
    """Return every cell of a release, grouped by verdict."""
    parts = []
    found = verdicts.verdicts(vllm)
    for verdict, cells in tables.grouped(found):
        parts.append(f"{verdict.kind.value}: {verdict.why}")
        if verdict.tagged:
            parts.append(f"  tagged bytes were right: {verdict.tagged}")
        if verdict.ended:
            parts.append(f"  plain vLLM, without kvpatch, ends on a CPU: {verdict.ended}")
        parts += [f"    {line}" for line in tables.describe(cells)]
    starts = {name: verdicts.admitted_with(name).get(vllm) for name in axes.TRIED}
    parts.append("together, by connector:")
    parts += [f"    {name}: {', '.join(who)}" for name, who in starts.items() if who]
    for (ascend, cell), verdict in npu.verdicts().items():
        if cell.vllm == vllm:
            parts.append(f"vllm-ascend {ascend} on an NPU: {verdict.kind.value}: {verdict.why}")
            parts.append(f"    {cell.connector}, {cell.runner}, {cell.layout}, {cell.model}")
    return "\n".join([*parts, "", counts(found)])


def counts(found: dict[axes.Cell, verdicts.Verdict]) -> str:
    """Return how many cells have each verdict, a line each."""
    counted = verdicts.counts(found.values())
    width = len(str(max(counted.values(), default=0)))
    each = (f"  {count:>{width}} {kind}" for kind, count in counted.items())
    return "\n".join([f"{sum(counted.values())} cells:", *each])


def rows(vllm: str | None, in_json: bool) -> str:
    """Return the outcome of each patch in each release."""
    newest = list(signatures.releases("kvcached").values())[-1]
    checked = {
        release: signatures.check_rows(recorded, newest)
        for release, recorded in signatures.releases("vllm").items()
        if vllm in (None, release)
    }
    if in_json:
        outcomes = {
            release: {
                row: {"outcome": v.outcome.value, "reason": v.reason} for row, v in of.items()
            }
            for release, of in checked.items()
        }
        return json.dumps(outcomes, indent=1)
    names = list(next(iter(checked.values())))
    table = columns(
        [
            ("patch", *checked),
            *((name, *(of[name].outcome.value for of in checked.values())) for name in names),
        ]
    )
    if distributions.host_device():
        return table
    return (
        f"{table}\n\n{distributions.HOST_DISTRIBUTION} is not installed, and its patches not listed"
    )
