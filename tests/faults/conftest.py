"""Faults of the machine, real where a kernel can be asked for them.

Tests may mount what they need: this process has a mount namespace of its own.
"""

import sys
from pathlib import Path

import pytest

from harness import namespaces
from harness.engines import process

# vLLM's tier classes as that lane steps them, without an engine.
sys.path.append(str(Path(__file__).parents[1] / "engine"))
from test_tier_classes import rows, tiers

__all__ = ["rows", "tiers"]


@pytest.fixture(autouse=True, scope="session")
def own_mounts():
    """What a test mounts is seen by its engines, and is gone with this process."""
    process.close_servers()  # of other lanes: they would not see it
    namespaces.own_mounts()


@pytest.fixture
def small(tmp_path):
    """Mount small file systems: a name, a size in bytes, a number of inodes."""
    mounted: list[Path] = []

    def mount(name: str, size: int, inodes: int = 0) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        namespaces.mount_tmpfs(folder, size, inodes)
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        namespaces.unmount(folder)
