"""The section of docs/faults.md that is made from the marks of the tests."""

from harness import faults


def test_a_marked_test_is_a_row(tmp_path):
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults/test_it.py").write_text(
        '"""Disks."""\n'
        '@pytest.mark.fault("it is full", "blocks are " "dropped")\n'
        "def test_full(): ...\n"
        "def test_else(): ...\n"
    )
    row = faults.Fault("it is full", "blocks are dropped", "test_full", "faults")
    assert faults.sections(tmp_path) == {"Disks": [row]}
