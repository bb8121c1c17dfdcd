"""The engine lane's tests of vLLM's own classes, with the classes of older releases."""

import subprocess
from pathlib import Path

import pytest

from harness import releases
from harness.engines.runs import python_of

# Of secondary tiers, of resets on the scheduler side of OffloadingConnector, and of groups that
# allocate one after the other.
SPANS = {
    "test_tier_classes.py": ("0.24", None),
    "test_resets.py": ("0.21", None),
    "test_prefix_of_groups.py": ("0.19", "0.24"),
}


@pytest.mark.parametrize(
    ("name", "vllm"),
    [
        (name, vllm)
        for name, (since, before) in SPANS.items()
        for vllm in releases.between(since, before)
        if vllm != releases.newest_built()  # the engine lane's
    ],
)
def test_the_classes_with_kvpatchs_rows(name, vllm):
    file = Path(__file__).parents[1] / "engine" / name
    ended = subprocess.run(
        [python_of(vllm), "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout
