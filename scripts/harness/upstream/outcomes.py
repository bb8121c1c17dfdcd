"""A pytest plug-in: what became of each test, and where an error was raised, as JSON.

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

_found: dict[str, dict[str, str]] = {}


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
        pytest_runtest_logreport(report)


def pytest_runtest_logreport(report: Any) -> None:
    """Note the first of a test's set-up, call and end that did not pass."""
    seen = _found.setdefault(report.nodeid, {"outcome": "passed", "words": ""})
    if report.outcome != "passed" and seen["outcome"] == "passed":
        seen.update(outcome=report.outcome, words=_words(report))


def pytest_sessionfinish() -> None:
    """End the processes that a failed test left: Python would wait for them at its end."""
    Path(os.environ[OUTCOMES]).write_text(json.dumps(_found))
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
