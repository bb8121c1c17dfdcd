"""scripts/new-vllm: what changed in a new release of vLLM, and what to run next.

    .venv/bin/python scripts/new-vllm 0.34.0

Unpacks the release without installing it, records the signatures of all targets in
kvpatch/matrix/data and compares each patch's with the release before. Exit status 1 when the
target of a patch moved.
"""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

from harness import console
from harness.matrix import record, sources
from kvpatch import gate, patches
from kvpatch.matrix import signatures
from kvpatch.matrix.signatures import Signatures
from kvpatch.patch import Patch

NEXT = """Next, as docs/contributing.md has it:
  1. give each patch that moved an end (before) and add a patch for {new} to its seam
  2. add "{new}": INSPECTED_ONLY to RELEASES in kvpatch/supported.py
  3. .venv/bin/python scripts/matrix engine {new}
  4. when that passes: VALIDATED, .venv/bin/python scripts/docs, scripts/test
"""


def before(version: str) -> Signatures | None:
    """Return the newest recorded release that is older than ``version``."""
    known = signatures.releases("vllm").values()
    older = [one for one in known if Version(one.version) < Version(version)]
    return older[-1] if older else None


def rows_of(release: Signatures) -> list[Patch]:
    """Return the patches for a release."""
    return [
        patch
        for feature in patches.FEATURES
        for patch in feature.patches
        if Version(release.version) in patch.span
    ]


def compare(old: Signatures, new: Signatures, kvcached: Signatures) -> int:
    """Print the patches whose target changed, with both signatures; return how many moved."""
    moved = 0
    for patch in rows_of(old):
        was, now = (signature(patch.target, release, kvcached) for release in (old, new))
        verdict = gate.check_target(patch, signatures.look(new, kvcached))
        if verdict.passed and was == now:
            continue
        moved += not verdict.passed
        word = "MOVED" if not verdict.passed else "changed, compatible with the patch"
        print(f"{patch.id}: {word}\n    {patch.target}")
        width = max(len(old.version), len(new.version))
        print(f"    {old.version:<{width}}  {was}\n    {new.version:<{width}}  {now}")
    return moved


def signature(target: str, vllm: Signatures, kvcached: Signatures) -> str:
    """Return the signature of ``target`` in a release, in words."""
    return kvcached.targets.get(target) or vllm.targets.get(target) or "not there"


def main() -> int:
    """Run the command line."""
    parser = console.parser("scripts/new-vllm", __doc__ or "")
    parser.add_argument("version", help="the exact version of the release")
    parser.add_argument("--archives", type=Path, help="a folder of downloaded wheels and sdists")
    arguments = parser.parse_args()
    try:
        old = before(arguments.version)
        new = record.record_signatures("vllm", arguments.version, arguments.archives)
    except (sources.NoSuchRelease, InvalidVersion) as error:
        sys.exit(f"new-vllm: {error}")
    if old is None:
        sys.exit(f"new-vllm: no older release than {new.version} is recorded to compare with")
    kvcached = list(signatures.releases("kvcached").values())[-1]
    print(f"vLLM {new.version} ({new.archive}) against {old.version}\n")
    moved = compare(old, new, kvcached)
    same = len(rows_of(old)) - moved
    print(f"\n{moved} patches moved, {same} find their target\n")
    print(NEXT.format(new=new.version))
    return int(moved > 0)
