"""Lanes: every test lies in exactly one folder of tests/, and carries its mark."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tests say for themselves what is on; what the caller's shell has set must not.
os.environ["KVPATCH"] = "0"

HERE = Path(__file__).parent
LANES = ("unit", "wheel", "refusals", "engine")


def lane_of(path: Path) -> str | None:
    """Return the lane whose folder ``path`` lies in, or None."""
    folders = path.relative_to(HERE).parts[:-1] if path.is_relative_to(HERE) else ()
    lanes = [folder for folder in folders if folder in LANES]
    return lanes[0] if len(lanes) == 1 and folders[0] == lanes[0] else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        lane = lane_of(item.path)
        if lane is None:
            raise pytest.UsageError(
                f"{item.nodeid} is in no lane: put it in one of tests/{{{','.join(LANES)}}}"
            )
        item.add_marker(lane)
