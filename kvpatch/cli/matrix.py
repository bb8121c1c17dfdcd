"""``kvpatch matrix``: what every release of vLLM gets, from the recorded results."""

from __future__ import annotations

import argparse
import json

from kvpatch.matrix import axes, shapes, tables, verdicts


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", action="store_true", help="print every cell as JSON")
    parser.add_argument("--vllm", metavar="RELEASE", help="every cell of one release")
    parser.add_argument("--rows", action="store_true", help="what becomes of each patch instead")
    parser.epilog = (
        "Without options: one line for each release, with kvcached of the newest release. "
        "Ends 2 when the release is not one that was looked at."
    )


def run(options: argparse.Namespace) -> int:
    """Print the matrix; return the exit code."""
    known = shapes.releases("vllm")
    if options.vllm not in (None, *known):
        print(f"vLLM {options.vllm} is not one of {', '.join(known)}")
        return 2
    if options.rows:
        print(rows(options.vllm, options.json))
    elif options.json:
        found = verdicts.verdicts(options.vllm)
        cells = [vars(cell) | told(verdict) for cell, verdict in found.items()]
        print(json.dumps({"counts": verdicts.counts(found.values()), "cells": cells}, indent=1))
    elif options.vllm:
        print(one_release(options.vllm))
    else:
        print(every_release())
    return 0


def told(verdict: verdicts.Verdict) -> dict[str, str]:
    """Return a verdict as JSON has it."""
    words = {"verdict": verdict.kind.value, "why": verdict.why}
    return words | ({"tagged bytes": verdict.tagged} if verdict.tagged else {})


def columns(lines: list[tuple[str, ...]]) -> str:
    """Return lines of cells with the columns under each other."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def every_release() -> str:
    """Return one line for each release, and the counts of the whole matrix."""
    found = verdicts.verdicts()
    newest = list(shapes.releases("kvcached"))[-1]
    head = ("vLLM", *(connector.name for connector in axes.CONNECTORS))
    lines = [head, *tables.summaries(found, newest)]
    return f"{columns(lines)}\n\nwith kvcached {newest}; older ones are refused\n{counts(found)}"


def one_release(vllm: str) -> str:
    """Return every cell of a release, those with the same verdict together."""
    parts = []
    found = verdicts.verdicts(vllm)
    for verdict, cells in tables.grouped(found):
        parts.append(f"{verdict.kind.value}: {verdict.why}")
        if verdict.tagged:
            parts.append(f"  tagged bytes were right: {verdict.tagged}")
        parts += [f"    {line}" for line in tables.describe(cells)]
    return "\n".join([*parts, "", counts(found)])


def counts(found: dict[axes.Cell, verdicts.Verdict]) -> str:
    """Return how many cells have each verdict."""
    counted = verdicts.counts(found.values())
    each = ", ".join(f"{count} {kind}" for kind, count in counted.items())
    return f"{sum(counted.values())} cells: {each}"


def rows(vllm: str | None, as_json: bool) -> str:
    """Return what becomes of each row of the registry in each release."""
    newest = list(shapes.releases("kvcached").values())[-1]
    checked = {
        release: shapes.check_rows(shapes_of, newest)
        for release, shapes_of in shapes.releases("vllm").items()
        if vllm in (None, release)
    }
    if as_json:
        told = {
            release: {
                row: {"outcome": v.outcome.value, "reason": v.reason} for row, v in of.items()
            }
            for release, of in checked.items()
        }
        return json.dumps(told, indent=1)
    names = list(next(iter(checked.values())))
    return columns(
        [
            ("patch", *checked),
            *((name, *(of[name].outcome.value for of in checked.values())) for name in names),
        ]
    )
