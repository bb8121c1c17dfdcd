"""The generated documentation is what the table says today."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")  # of .venv, for the pictures; scripts/pythons is without

ROOT = Path(__file__).parents[2]


def test_the_generated_files_are_current(run):
    done = run(sys.executable, ROOT / "scripts/docs", "--check", PYTHONPATH=ROOT)
    assert (done.code, done.err) == (0, "")


@pytest.fixture
def copy(tmp_path):
    """A copy of what the generator reads and writes."""
    for name in ("kvpatch", "docs", "scripts", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


STALE = {
    "docs/patches.md": "`>=0.31`",
    "docs/support.md": "| fence |",
    "docs/errors.md": "| `KVP101` |",
    "docs/settings.md": "| `KVPATCH` |",
    "docs/faults.md": "| fault |",
    "README.md": "| 0.32.0 |",
}


def test_stale_files_are_found_and_renewed(run, copy):
    run = partial(run, sys.executable, copy / "scripts/docs", PYTHONPATH=copy)
    current = {stale: (copy / stale).read_text() for stale in STALE}
    for stale, text in current.items():
        assert STALE[stale] in text
        (copy / stale).write_text(text.replace(STALE[stale], "| other |", 1))
    done = run("--check")
    assert done.code == 1
    assert done.err == f"stale: {', '.join(STALE)}; run .venv/bin/python scripts/docs\n"
    assert run().code == 0
    assert {stale: (copy / stale).read_text() for stale in STALE} == current
    assert run("--check").code == 0


def test_a_change_of_the_table_makes_them_stale(run, copy):
    table = copy / "kvpatch/supported.py"
    table.write_text(f'{table.read_text()}RELEASES["0.32.0"] = INSPECTED_ONLY\n')
    done = run(sys.executable, copy / "scripts/docs", "--check", PYTHONPATH=copy)
    assert done.code == 1
    assert done.err.startswith("stale: docs/support.md, README.md;")
