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
    for test, one in sorted(found.items()):
        if test not in causes or VARYING & {causes[test], listed.get(test)}:
            continue
        if test not in listed:
            wrong.append(f"{test} is not listed, and with kvpatch is {_said(one)}")
        elif listed[test] != causes[test]:
            wrong.append(f"{test} is listed as {listed[test]}, and with kvpatch is {_said(one)}")
    for test in sorted(set(listed) - set(found)):
        if off.get(test, ABSENT).outcome == "passed":
            if listed[test] in VARYING:
                continue
            wrong.append(f"{test} is listed as {listed[test]}, and passes")
        else:
            before = off.get(test, ABSENT)
            wrong.append(f"{test} is listed, and without kvpatch is {_said(before)}")
    return wrong


def _said(one: Outcome) -> str:
    return f"{one.outcome}: {one.words}"
