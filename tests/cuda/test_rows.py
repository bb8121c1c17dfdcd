"""Rows that order copies: with one taken out, the emulated device names what is not ordered.

The copies are those of the connectors' own classes, without an engine, and of engines whose
requests end with their first token, so that pages are given back at once.
"""

import subprocess
from pathlib import Path

import pytest

from harness import ROOT, releases
from harness.cuda import campaign, emulated

PARTS = ROOT / "scripts/harness/cuda/parts.py"
AFTER = "not ordered after aten::fill_.Scalar of stream"
UNMAPS = "RACE: cuMemUnmap writes at"
OF_COPY = "not ordered after cuMemcpyBatchAsync of stream"
READS, WRITES = ("cuMemcpyBatchAsync reads at", AFTER), ("cuMemcpyBatchAsync writes at", AFTER)
# The release, the part and the row; the complaints without it.
ROWS = [
    ("0.26.0", "offloading", "offloading.loads_in_order", [WRITES]),
    ("0.20.0", "simple", "simple_offload.copies_in_order", [READS, WRITES]),
    ("0.32.0", "ended", "simple_offload.shutdown", [(UNMAPS, OF_COPY)]),
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
def test_a_copy_is_ordered_with_the_row_only(tmp_path, release, part, row, without):
    for name in ("with", "less"):
        (tmp_path / name).mkdir()
    assert complaints(release, tmp_path / "with", part) == []
    found = complaints(release, tmp_path / "less", part, row)
    assert len(found) == len(without)
    for said, words in zip(found, without, strict=True):
        assert all(word in said for word in words), found


RELEASE = releases.newest_built()
# Without fence.install, kvcached waits for the whole device if scheduling is asynchronous.
OF_ENGINES = {
    "all rows": {},
    "fence.build": {"revert": ["fence.build"]},
    "fence.release": {"revert": ["fence.release"]},
    "fence.install": {"revert": ["fence.install"], "engine": {"async_scheduling": False}},
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    campaign.plain(RELEASE, folder)
    given = campaign.engines(folder)["Offloading"]
    given |= {"step": "hurried", "rounds": [("none", 0), ("copies last", 1)]}
    wanted = {
        name: given | one | {"engine": given["engine"] | one.get("engine", {})}
        for name, one in OF_ENGINES.items()
    }
    found = campaign.ours(RELEASE, folder, wanted)
    return {name: campaign.summed(one, RELEASE) for name, one in found.items()}


def test_requests_that_end_at_once_are_stored_and_loaded(engines):
    assert campaign.right(engines["all rows"]), engines["all rows"]


@pytest.mark.parametrize("row", ["fence.build", "fence.release"])
def test_an_engine_without_the_row_unmaps_under_a_copy(engines, row):
    assert engines[row]["first complaint"].startswith(UNMAPS), engines[row]
    assert OF_COPY in engines[row]["first complaint"]


def test_an_engine_without_the_fence_loads_other_bytes(engines):
    assert engines["fence.install"]["blocks"]["wrong"] > 0, engines["fence.install"]
    assert engines["fence.install"]["wrong answers"] > 0
