"""Rows that order copies: with one taken out, the emulated device names what is not ordered.

The copies are those of the connectors' own classes, without an engine.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness import ROOT
from harness.cuda import emulated

PARTS = ROOT / "scripts/harness/cuda/parts.py"
AFTER = "not ordered after aten::fill_.Scalar of stream"
READS, WRITES = ("cuMemcpyBatchAsync reads at", AFTER), ("cuMemcpyBatchAsync writes at", AFTER)
# The release, the part and the row; the complaints without it.
ROWS = [
    ("0.26.0", "offloading", "offloading.loads_in_order", [WRITES]),
    ("0.20.0", "simple", "simple_offload.copies_in_order", [READS, WRITES]),
]


def complaints(release: str, folder: Path, *words: str) -> list[str]:
    python = emulated.made(release)
    environment = emulated.environ(release, folder, KVCACHED_CONTIGUOUS_LAYOUT="false")
    command = [python, "-P", PARTS, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = emulated.complaints_of(folder)
    return found.read_text().splitlines() if found.exists() else []


@pytest.mark.parametrize(("release", "part", "row", "without"), ROWS)
def test_a_copy_is_ordered_with_the_row_only(
    tmp_path: Path, release: str, part: str, row: str, without: list[tuple[str, str]]
) -> None:
    for name in ("with", "less"):
        (tmp_path / name).mkdir()
    assert complaints(release, tmp_path / "with", part) == []
    found = complaints(release, tmp_path / "less", part, row)
    assert len(found) == len(without)
    for said, words in zip(found, without, strict=True):
        assert all(word in said for word in words), found
