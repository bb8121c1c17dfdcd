"""scripts/new-vllm: what changed in a new release of vLLM, and what to run next.

    .venv/bin/python scripts/new-vllm 0.34.0

Unpacks the release without installing it, records the signatures of all targets in
kvpatch/matrix/data and compares each patch's with the release before; then the text of the
functions that patches change, and of those that these call. Exit status 1 when the target of a
patch moved.
"""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

from harness import console
from harness.matrix import below, record, sources
from harness.matrix.signatures import Sources
from kvpatch import gate, patches
from kvpatch.matrix import sharing, signatures
from kvpatch.matrix.signatures import Signatures
from kvpatch.patch import Patch

NEXT = """Next, as docs/contributing.md has it:
  1. give each patch that moved an end (before) and add a patch for {new} to its seam
  2. add "{new}": INSPECTED_ONLY to RELEASES in kvpatch/supported.py
  3. .venv/bin/python scripts/matrix engine {new}
  4. when that passes: VALIDATED, .venv/bin/python scripts/docs, scripts/test
"""


NEAR = ("patched", "called by it")


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


def compare_below(old: str, new: str) -> None:
    """Print the functions that differ, those that a patch names or calls directly by name."""
    was, now = (
        below.below(Sources(sources.unpack("vllm", one).folder), sharing.targets_of(one))
        for one in (old, new)
    )
    changed = below.changed(was, now)
    if not changed:
        print(f"the {len(now)} functions below the patches are the same: nothing moved\n")
        return
    print(f"{len(changed)} of {len(now)} functions below the patches changed; to be read:")
    far = 0
    for name in changed:
        steps = (now.get(name) or was[name]).steps
        word = "gone" if name not in now else "new" if name not in was else "changed"
        if steps < len(NEAR):
            print(f"    {NEAR[steps]}, {word}: {name}")
        else:
            far += 1
    print(f"    and {far} further away\n")


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
    compare_below(old.version, new.version)
    print(NEXT.format(new=new.version))
    return int(moved > 0)
