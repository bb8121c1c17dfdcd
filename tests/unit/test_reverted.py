"""Rows that tests take out of engines: one that was not in force is an error of the test."""

import ast
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.engines import process, reverted, runs
from harness.engines.reverted import NOT_IN_FORCE, NotInForce
from kvpatch import activation, patches

TESTS = Path(__file__).parents[1]
IDS = {row.id for feature in patches.FEATURES for row in feature.patches}


class Left(BaseException):
    """This process would have ended."""


@pytest.fixture
def ended(monkeypatch):
    def leave(code):
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)


def test_a_row_that_is_in_force_is_taken_out(monkeypatch):
    taken = []
    revert = SimpleNamespace(revert=lambda row: not taken.append(row))
    monkeypatch.setattr(activation, "transaction", revert)
    reverted.revert(["a", "b"])
    assert taken == ["a", "b"]


@pytest.mark.parametrize("row", ["simple_offload.register_kv_caches", "no.row"])
def test_a_row_that_is_not_in_force_ends_the_process_with_a_status_of_its_own(
    ended, monkeypatch, capsys, row
):
    """The engine would end by itself, as tests expect of one without a row."""
    monkeypatch.setattr(activation, "transaction", activation.Transaction())
    with pytest.raises(Left, match=str(NOT_IN_FORCE)):
        reverted.revert([row])
    assert capsys.readouterr().out == f"driver: {row} is not in force, and cannot be taken out\n"


def test_so_does_one_that_another_package_has_patched_over(ended, monkeypatch, capsys):
    monkeypatch.setattr(activation, "transaction", SimpleNamespace(revert=lambda row: False))
    with pytest.raises(Left):
        reverted.revert(["a"])
    assert "driver: a is patched over, and" in capsys.readouterr().out


def test_no_test_gets_to_see_how_such_an_engine_ended(tmp_path, monkeypatch):
    def start(module, arguments, environment, python, output):
        output.write("driver: a is not in force, and cannot be taken out\nmore\n")
        return SimpleNamespace(wait=lambda timeout: NOT_IN_FORCE)

    monkeypatch.setattr(process, "start", start)
    with pytest.raises(NotInForce, match=r"^driver: a is not in force"):
        runs.run_driver({}, {}, tmp_path)
    assert not issubclass(NotInForce, AssertionError | LookupError)


@pytest.mark.parametrize("code", [0, 1, -11])
def test_an_engine_that_ends_otherwise_has_ended(code):
    reverted.check(code, "driver: ready\n")


def taken_out():
    """Every row that is named where a test takes rows out of an engine."""
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            given = []
            if isinstance(node, ast.keyword) and node.arg == "revert":
                given = [node.value]
            if isinstance(node, ast.Dict):
                given = [
                    value
                    for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant) and key.value == "revert"
                ]
            for word in (one for value in given for one in ast.walk(value)):
                if isinstance(word, ast.Constant) and isinstance(word.value, str):
                    yield path.name, word.value


def test_every_row_that_a_test_takes_out_of_an_engine_is_in_the_table():
    named = list(taken_out())
    assert ("test_simple.py", "simple_offload.register_placed") in named
    assert [one for one in named if one[1] not in IDS] == []
