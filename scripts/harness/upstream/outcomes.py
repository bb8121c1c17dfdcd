"""A pytest plug-in: what became of each test, a line of JSON each, so that a run may be killed.

In the process of vLLM's or kvcached's tests; ``harness.upstream.OUTCOMES`` names the file.
"""

import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import pytest

from harness.upstream import OUTCOMES

# What vLLM's tests must tear down after themselves; the others need no garbage collection of
# 0.3 s after each, and vLLM has this mark for them.
TEARS_DOWN = {"dist_init", "workspace_init"}

_seen: dict[str, dict[str, Any]] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Make vLLM's mark known to kvcached's tests, whose options do not have it."""
    config.addinivalue_line("markers", "skip_global_cleanup: no garbage collection after it")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Give vLLM's mark to the tests that have nothing to tear down."""
    for item in items:
        if not TEARS_DOWN & set(item.fixturenames):
            item.add_marker("skip_global_cleanup")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be collected, or that skips itself."""
    if report.outcome != "passed":
        _write(report.nodeid, report.outcome, _words(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the worst of a test's set-up, call and end."""
    seen = _seen.setdefault(report.nodeid, {"outcome": "passed", "words": ""})
    if report.outcome != "passed" and seen["outcome"] == "passed":
        seen.update(outcome=report.outcome, words=_words(report))
    if report.when == "teardown":
        _write(report.nodeid, **_seen.pop(report.nodeid))


def pytest_sessionfinish() -> None:
    """End the processes that a failed test left: Python would wait for them at its end."""
    for child in multiprocessing.active_children():
        child.kill()


def _words(report: Any) -> str:
    """Return the error in a line, and where it was raised, without addresses."""
    if report.outcome == "skipped":
        return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return " ".join(str(report.longrepr).split())[-400:]
    message = re.sub(r"0x[0-9a-f]+", "0x", " ".join(crash.message.split()))
    where = re.sub(r"^.*(site-packages/|/(?=kvpatch/)|tests/)", "", crash.path)
    refused = re.search(r"\[KVP\d+\]", message)  # at the end of a sentence
    return f"{message[:400]}{' ' + refused[0] if refused else ''} [{where}]"


def _write(test: str, outcome: str, words: str) -> None:
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "words": words}) + "\n")
