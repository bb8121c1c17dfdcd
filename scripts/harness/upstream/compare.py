"""Compares the runs of a suite: what passes without kvpatch, and not with it."""

from collections.abc import Mapping

from harness.upstream.causes import VARYING, cause_of
from harness.upstream.runner import Outcome

ABSENT = Outcome("absent", "it was not collected")
Tests = Mapping[str, Outcome]
Listed = Mapping[str, str]  # the name of the cause by test


def differences(off: Tests, on: Tests) -> dict[str, Outcome]:
    """Return what became, with kvpatch, of each test that passes without and not with it."""
    found = {test: on.get(test, ABSENT) for test, one in off.items() if one.outcome == "passed"}
    return {test: one for test, one in found.items() if one.outcome != "passed"}


def caused(found: Tests) -> tuple[dict[str, str], list[str]]:
    """Return the name of the cause of each difference, and those that have none."""
    listed, unknown = {}, []
    for test, one in sorted(found.items()):
        cause = cause_of(test, one)
        if cause is None:
            unknown.append(f"{test} passes without kvpatch, and with it is {_said(one)}")
        else:
            listed[test] = cause.name
    return listed, unknown


def verdict(off: Tests, on: Tests, listed: Listed) -> list[str]:
    """Return what is wrong with a suite, given the list in docs/results; nothing if it is right.

    Args:
        off: what became of each test without kvpatch.
        on: and with it.
        listed: the tests that may differ.
    """
    found = differences(off, on)
    causes, wrong = caused(found)
    for test in sorted(found.keys() | listed.keys()):
        old, new, before = listed.get(test), causes.get(test), off.get(test, ABSENT)
        if before.outcome != "passed":
            wrong.append(f"{test} is listed, and without kvpatch is {_said(before)}")
        elif old != new and not VARYING & {old, new} and (new or test not in found):
            now = _said(found[test]) if test in found else "passed"
            was = f"listed as {old}" if old else "not listed"
            wrong.append(f"{test} is {was}, and with kvpatch is {now}")
    return wrong


def _said(one: Outcome) -> str:
    return f"{one.outcome}: {one.words}"
