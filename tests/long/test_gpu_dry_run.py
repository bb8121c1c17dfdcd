"""The GPU stages on the host device: what they would say of a GPU is what they can see."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from harness import ROOT


def dry_run(folder, *stages):
    """Run stages as scripts/gpu does on a machine without a GPU, with --dry."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVPATCH", "KVCACHED", "ENABLE_KVCACHED", "VLLM", "TRITON"))
    }
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/gpu", "--dry", "--output", folder, *stages],
        env=kept,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return {stage: json.loads((folder / f"gpu-{stage}.json").read_text()) for stage in stages}


def test_the_stages_move_bytes_and_say_what_moved(tmp_path):
    found = dry_run(tmp_path, "roundtrips", "copies")
    trips, copies = found["roundtrips"]["rows"], found["copies"]["rows"]
    assert found["roundtrips"]["machine"]["gpu"].startswith("none: a dry run")
    assert {(row["what"], row["connector"], row["layout"]) for row in trips} == {
        (what, connector, layout)
        for layout in ("contiguous", "a pool for each layer")
        for what, connector in (
            ("round trip", "OffloadingConnector"),
            ("freed while the copy is held", "OffloadingConnector"),
            ("round trip", "SimpleCPUOffloadConnector"),
        )
    }
    assert all(row["equal"] == row["blocks"] > 0 for row in trips)
    for row in trips:
        if "mapped_bytes" in row:
            mapped = row["mapped_bytes"]
            assert mapped["after"] < mapped["under the copy"] == mapped["before"]
    # A block is one row in the contiguous layout, and each layer's are rows otherwise.
    rows = {
        layout: {r["row_bytes"] for r in copies if r["layout"] == layout}
        for layout in ("contiguous", "a pool for each layer")
    }
    assert min(rows["contiguous"]) >= 8 * min(rows["a pool for each layer"])
    assert all(row["gb_per_second"] > 0 for row in copies)
