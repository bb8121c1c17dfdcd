"""Which files of tests have to run: by what they executed when they last ran."""

import pytest

pytest.importorskip("numpy")  # of .venv: the harness' models, for what every run depends on

from harness.console import HarnessError
from harness.evidence import of_tests, units
from kvpatch import patches

FILE = "tests/unit/test_gate.py"
FUNCTION = "kvpatch.gate:check_environment"


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Record that a file of tests executed one function, and what a row wraps with."""
    monkeypatch.setattr(of_tests, "RESULTS", tmp_path / "lanes.json")
    monkeypatch.setattr(of_tests.provenance, "commit", lambda *of: "0123456789ab")
    monkeypatch.setattr(of_tests, "_digest", of_tests._digest.__wrapped__)
    tree = units.Tree()
    monkeypatch.setattr(of_tests, "tree", lambda: tree)
    wrote = tmp_path / "wrote"

    def record():
        row = next(iter(patches.FEATURES[-1].patches))
        lines = []
        for name in (FUNCTION, row.wrapper):
            unit = tree.get(name)
            assert unit is not None
            file = str(tree.files[name.partition(":")[0]].relative_to(tree.root))
            lines.append(f"{file}:{unit.lines[0]}\n")
        wrote.write_text("".join(lines))
        of_tests.record({FILE: (3, wrote)})

    yield record


def left_out():
    return list(of_tests.unchanged("tests/unit"))


def test_a_file_that_never_ran_runs(recorded):
    assert left_out() == []


def test_a_file_of_which_nothing_changed_is_left_out(recorded):
    recorded()
    assert left_out() == [(FILE, "0123456789ab")]


def test_a_function_that_it_executed_makes_it_run(recorded, monkeypatch):
    recorded()
    of_module = of_tests.tree().of_module("kvpatch.gate")
    monkeypatch.setitem(of_module, FUNCTION, of_module[FUNCTION]._replace(digest="another"))
    assert left_out() == []
    del of_module[FUNCTION]
    assert left_out() == []


def test_a_function_that_it_did_not_execute_changes_nothing(recorded, monkeypatch):
    recorded()
    of_module = of_tests.tree().of_module("kvpatch.gate")
    other = "kvpatch.gate:check_feature"
    monkeypatch.setitem(of_module, other, of_module[other]._replace(digest="another"))
    assert left_out() == [(FILE, "0123456789ab")]


def test_a_row_whose_wrapper_it_executed_makes_it_run(recorded, monkeypatch):
    recorded()
    row = next(iter(patches.FEATURES[-1].patches))
    changed = units.of_rows() | {f"row:{row.id}": "another"}
    monkeypatch.setattr(units, "of_rows", lambda: changed)
    assert left_out() == []


@pytest.mark.parametrize("name", [FILE, "tests/conftest.py", "tests/unit/pool_world.py"])
def test_its_own_text_and_its_helpers_make_it_run(name, recorded, monkeypatch):
    recorded()
    digest = of_tests._digest
    monkeypatch.setattr(of_tests, "_digest", lambda of: "another" if of == name else digest(of))
    assert left_out() == []


def test_a_table_of_units_that_a_merge_changed_is_refused(recorded):
    recorded()
    text = of_tests.RESULTS.read_text()
    of_tests.RESULTS.write_text(text.replace('"units": [', '"units": ["one more 1",'))
    with pytest.raises(HarnessError, match="others than it was recorded with, by a merge"):
        left_out()
