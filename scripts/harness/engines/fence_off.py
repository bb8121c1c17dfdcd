"""A vLLM plugin: the processes of a server that finds it have no fence.

vLLM loads it before it makes the engine, and so before kvcached asks for the fence.
"""

from __future__ import annotations

from pathlib import Path

ENTRY = "[vllm.general_plugins]\nfence_off = harness.engines.fence_off:take_out\n"


def take_out() -> None:
    """Take the fence out of this process."""
    from kvpatch import activation

    assert activation.transaction.revert("fence.install")


def install(folder: Path) -> str:
    """Make the distribution that names this plugin; return a path on which it is found."""
    entry = folder / "fence_off-0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: fence-off\nVersion: 0\n")
    (entry / "entry_points.txt").write_text(ENTRY)
    return str(folder)
