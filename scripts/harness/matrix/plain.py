"""What plain vLLM does on a CPU, in the combinations that kvpatch has not validated.

``plain`` has one file per release of vLLM: its engines on static memory, without kvpatch and
without a connector, by runner, kind of model and feature. Where such an engine ends by itself, no
engine on a CPU can validate a cell, nor one with more turned on; a GPU may run it.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from harness.matrix import shapes
from kvpatch.matrix.verdicts import NONE, Cell

LEVEL = "plain"  # the folder


class Combination(NamedTuple):
    """What of a cell plain vLLM has too: no connector, and no layout of kvcached's."""

    vllm: str
    runner: str
    model: str
    feature: str


def combination_of(cell: Cell) -> Combination:
    """Return the combination of a cell."""
    return Combination(cell.vllm, cell.runner, cell.model, cell.feature)


@cache
def runs(data: Path = shapes.DATA) -> dict[Combination, str]:
    """Return the recorded runs: with what vLLM ended, or nothing where it came to its end."""
    found = {}
    for path in sorted((data / LEVEL).glob("*.json")):
        result = json.loads(path.read_text())
        for run in result["runs"]:
            made = Combination(
                result["vllm"], run["runner"], run["model"], run.get("feature", NONE)
            )
            found[made] = run["ended"]
    return found


def ended(cell: Cell) -> str:
    """Return with what plain vLLM ends where a cell is; empty if it runs, or did not run yet.

    Where it did not run with a feature, with what it ends without: a missing kernel stays missing.
    """
    made, known = combination_of(cell), runs()
    return known.get(made, known.get(made._replace(feature=NONE), ""))


def forget() -> None:
    """Clear what is remembered of the recorded runs."""
    runs.cache_clear()
