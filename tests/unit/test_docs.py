"""The generated documentation is what the table says today."""

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")  # of .venv, for the pictures; scripts/pythons is without

from harness import docs
from harness.matrix import derive
from kvpatch import patches, rules, supported

ROOT = Path(__file__).parents[2]
STALE = {
    "docs/patches.md": "`>=0.31`",
    "docs/support.md": "| fence |",
    "docs/errors.md": "| `KVP101` |",
    "docs/settings.md": "| `KVPATCH` |",
    "docs/faults.md": "| fault |",
    "README.md": "| 0.32.0 |",
}


def texts(root):
    """Everything that a generated file can be."""
    files = [root / "README.md", *(path for path in root.glob("docs/**/*") if path.is_file())]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_the_generated_files_are_current_and_stale_ones_are_renewed(run, tmp_path):
    """Otherwise: .venv/bin/python scripts/docs."""
    for name in ("kvpatch", "docs", "scripts", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    for name, text in STALE.items():
        current = (ROOT / name).read_text()
        assert text in current
        (tmp_path / name).write_text(current.replace(text, "| other |", 1))
    done = run(sys.executable, tmp_path / "scripts/docs", PYTHONPATH=tmp_path)
    assert (done.code, done.err) == (0, "")
    made, current = texts(tmp_path), texts(ROOT)
    assert [name for name in made | current if made.get(name) != current.get(name)] == []


def test_a_check_names_the_stale_files_and_writes_none(monkeypatch, capsys, tmp_path):
    made = {"a": "current", "docs/b": "new", "docs/c": "missing"}
    old = {"a": "current", "docs/b": "old"}
    (tmp_path / "docs").mkdir()
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "every_file", lambda: made)

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["scripts/docs", *options])
        return docs.main(), capsys.readouterr().err

    stale = "stale: docs/b, docs/c; run .venv/bin/python scripts/docs\n"
    assert run("--check") == (1, stale)
    assert {name: (tmp_path / name).read_text() for name in old} == old
    assert not (tmp_path / "docs/c").exists()
    assert run() == (0, "")
    assert {name: (tmp_path / name).read_text() for name in made} == made
    assert run("--check") == (0, "")


@pytest.fixture
def another_table(monkeypatch):
    # A rule's releases are those of the table when its module is imported.
    rules.of(feature.rules for feature in patches.FEATURES)
    monkeypatch.setitem(supported.RELEASES, "0.32.0", supported.INSPECTED_ONLY)
    derive.forget()
    yield
    monkeypatch.undo()
    derive.forget()


def test_a_change_of_the_table_makes_them_stale(another_table):
    matrix = derive.matrix()
    made = docs.pages(matrix) | docs.fronts(matrix)
    stale = [name for name, text in made.items() if text != (ROOT / name).read_text()]
    assert stale == ["docs/support.md", "README.md"]
