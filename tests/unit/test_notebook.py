"""docs/python.ipynb runs, and prints what it has as its outputs."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "docs/python.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_prints_what_it_shows(run, fakes):
    source = "\nprint('-- next')\n".join("".join(cell["source"]) for cell in CODE)
    done = run(sys.executable, "-c", source, PYTHONPATH=f"{fakes}:{ROOT}")
    assert (done.code, done.err) == (0, "")
    printed = done.out.split("-- next\n")
    shown = ["".join(line for one in cell["outputs"] for line in one["text"]) for cell in CODE]
    assert printed == shown


def test_it_is_a_notebook_that_was_not_run_by_hand():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert all(cell["execution_count"] is None for cell in CODE)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
