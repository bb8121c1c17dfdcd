"""docs/results/upstream.json: what the suites gave, and the tests that may differ."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import ROOT, provenance
from harness.console import HarnessError
from harness.upstream import downloads
from harness.upstream.runner import Run
from harness.upstream.suites import SUITES, Suite

RESULT = ROOT / "docs/results/upstream.json"
COMMAND = "scripts/upstream"


def read(path: Path = RESULT) -> dict[str, Any]:
    """Return the result file; without suites if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"suites": {}}
    return found


def listed(suite: str) -> dict[str, str]:
    """Return the name of the cause of each test of a suite that may differ.

    Raises:
        HarnessError: the suite was not recorded yet.
    """
    suites = read()["suites"]
    if suite not in suites:
        raise HarnessError(f"{suite} has no list yet: run {COMMAND} {suite}")
    causes = suites[suite]["listed"]
    return {test: name for name, tests in causes.items() for test in tests}


def of(off: Run, on: Run, causes: Mapping[str, str]) -> dict[str, Any]:
    """Return the result of a suite, given the cause of each test that differs."""
    listed: dict[str, list[str]] = {}
    for test, name in sorted(causes.items(), key=lambda one: one[::-1]):
        listed.setdefault(name, []).append(test)
    return {"without kvpatch": counted(off), "with kvpatch": counted(on), "listed": listed}


def counted(run: Run) -> dict[str, Any]:
    """Return how many tests of a run had each outcome, and its seconds."""
    found = [one.outcome for one in run.tests.values()]
    counts: dict[str, Any] = {name: found.count(name) for name in sorted(set(found))}
    return counts | {"seconds": round(run.seconds)}


def write(suite: Suite, head: dict[str, Any], result: dict[str, Any]) -> None:
    """Write the result of a suite, with the head of its own run, and keep the others'."""
    suites = read()["suites"] | {suite.name: head | {"sources": downloads.releases()} | result}
    in_order = {one.name: suites[one.name] for one in SUITES if one.name in suites}
    provenance.write({"suites": in_order}, RESULT)
