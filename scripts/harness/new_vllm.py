#!/usr/bin/env python3
"""For the day a release of vLLM appears: what moved in it, and what to run next.

    scripts/new-vllm 0.34.0

Unpacks the release without installing it, records its shapes in kvpatch/matrix/data and
compares every row of the registry with the release before it. Ends 1 when a row moved.
Run it with the environment's Python: .venv/bin/python scripts/new-vllm
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ["KVPATCH"] = "0"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from packaging.version import InvalidVersion, Version  # noqa: E402

from kvpatch import gate, registry  # noqa: E402
from kvpatch.matrix import shapes  # noqa: E402
from kvpatch.patch import Patch  # noqa: E402
from harness.matrix import record, sources  # noqa: E402

NEXT = """Next:
  1. give each row that moved an end before {new} and a second row from {new} on, in
     kvpatch/registry; widen the others' ranges to hold {new}
  2. try it: scripts/environment {new}, then KVPATCH_ALLOW_VLLM={new} with its Python
  3. .venv/bin/python scripts/matrix engine {new}
  4. when that is right: widen kvpatch/registry/releases.py, .venv/bin/python scripts/docs,
     scripts/test
"""


def before(version: str) -> shapes.Shapes | None:
    """Return the newest recorded release that is older than ``version``."""
    older = [
        one for one in shapes.releases("vllm").values() if Version(one.version) < Version(version)
    ]
    return older[-1] if older else None


def rows_of(release: shapes.Shapes) -> list[Patch]:
    """Return the rows that a release is in the range of."""
    found = shapes.release("vllm", release.version)
    return [
        patch
        for feature in registry.FEATURES
        for patch in feature.patches
        if gate.in_range(found, patch.vllm)
    ]


def compare(old: shapes.Shapes, new: shapes.Shapes, kvcached: shapes.Shapes) -> int:
    """Print the rows that moved, with the two signatures; return how many did."""
    moved = 0
    for patch in rows_of(old):
        was, now = (said(patch.target, release, kvcached) for release in (old, new))
        verdict = gate.check_target(patch, shapes.look(new, kvcached))
        if verdict.passed and was == now:
            continue
        moved += not verdict.passed
        word = "MOVED" if not verdict.passed else "changed, and still takes what the row names"
        print(f"{patch.id}: {word}\n    {patch.target}")
        width = max(len(old.version), len(new.version))
        print(f"    {old.version:<{width}}  {was}\n    {new.version:<{width}}  {now}")
    return moved


def said(target: str, vllm: shapes.Shapes, kvcached: shapes.Shapes) -> str:
    """Return what a release has at ``target``, in words."""
    return kvcached.targets.get(target) or vllm.targets.get(target) or "not there"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="the exact version of the release")
    parser.add_argument("--archives", type=Path, help="a folder of downloaded wheels and sdists")
    arguments = parser.parse_args()
    try:
        old = before(arguments.version)
        new = record.record_shapes("vllm", arguments.version, arguments.archives)
    except (sources.NoSuchRelease, InvalidVersion) as error:
        sys.exit(f"new-vllm: {error}")
    if old is None:
        sys.exit(f"new-vllm: no older release than {new.version} is recorded to compare with")
    kvcached = list(shapes.releases("kvcached").values())[-1]
    print(f"vLLM {new.version} ({new.archive}) against {old.version}\n")
    moved = compare(old, new, kvcached)
    same = len(rows_of(old)) - moved
    print(f"\n{moved} rows moved, {same} find what they name\n")
    print(NEXT.format(new=new.version))
    return int(moved > 0)


if __name__ == "__main__":
    sys.exit(main())
