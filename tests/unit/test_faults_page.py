"""docs/faults.md is made from the marks of the tests."""

import pytest

from harness import faults


@pytest.fixture
def lane(tmp_path, monkeypatch):
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults/test_it.py").write_text(
        '"""Disks."""\n'
        '@pytest.mark.fault("it is full", "blocks are " "dropped")\n'
        "def test_full(): ...\n"
        "def test_else(): ...\n"
    )
    monkeypatch.setattr(faults, "ELSEWHERE", {"Disks": [("it hangs", "passed over", "test_else")]})
    return tmp_path


def test_a_marked_test_and_one_that_is_named_are_rows(lane):
    full, hung = faults.sections(lane)["Disks"]
    assert full == faults.Fault("it is full", "blocks are dropped", "test_full", "faults")
    assert hung == faults.Fault("it hangs", "passed over", "test_else", "faults")


def test_a_test_that_is_named_must_exist(lane, monkeypatch):
    monkeypatch.setattr(faults, "ELSEWHERE", {"Disks": [("it hangs", "", "test_gone")]})
    with pytest.raises(LookupError, match="test_gone"):
        faults.sections(lane)
