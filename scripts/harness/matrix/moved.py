"""What moved from one release to the next: the rows' targets, and the text below them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from harness.matrix import below, shapes, sharing, sources
from harness.matrix.shapes import Signatures
from harness.matrix.signatures import Sources
from kvpatch import gate, patches
from kvpatch.patch import Patch

# By calls from a target. What is further away is counted: engines run it, nobody reads all of it.
NEAR = ("patched", "called by it")


@dataclass
class Moved:
    """What differs between two releases.

    Attributes:
        rows: rows that do not find their target, and seams with a hole; start-up refuses these.
        signatures: rows whose target has another signature, with which they can do.
        functions: what the text of differs near a row.
        far: how many functions differ further away.
    """

    rows: list[str] = field(default_factory=list)
    signatures: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    far: int = 0
    text: str = ""

    @property
    def to_read(self) -> int:
        """How many things a person has to read."""
        return len(self.rows) + len(self.signatures) + len(self.functions)


def between(old: Signatures, new: Signatures) -> Moved:
    """Return what moved between two recorded releases."""
    kvcached = list(shapes.releases("kvcached").values())[-1]
    found = Moved()
    compare_rows(old, new, kvcached, found)
    compare_below(old.version, new.version, found)
    return found


def rows_of(release: Signatures) -> list[Patch]:
    """Return the patches for a release."""
    return [
        patch
        for feature in patches.FEATURES
        for patch in feature.patches
        if Version(release.version) in patch.span
    ]


def compare_rows(old: Signatures, new: Signatures, kvcached: Signatures, found: Moved) -> None:
    """Find the rows of the new release whose target is not there, or has another signature."""
    width = max(len(old.version), len(new.version))
    of_old = rows_of(old)
    for patch in rows_of(new):
        was, now = (signature(patch.target, release, kvcached) for release in (old, new))
        verdict = gate.check_target(patch, shapes.look(new, kvcached))
        both = (
            f"    {patch.target}\n"
            f"    {old.version:<{width}}  {was}\n    {new.version:<{width}}  {now}"
        )
        if not verdict.passed:
            found.rows.append(f"{patch.id}: MOVED\n{both}")
        elif patch in of_old and was != now:
            found.signatures.append(f"{patch.id}: changed, compatible with the patch\n{both}")
    found.rows.extend(f"{hole}" for hole in shapes.holes(new.version))


def compare_below(old: str, new: str, found: Moved) -> None:
    """Find the functions that differ, those that a patch names or calls directly by name."""
    if old in sharing.recorded() and sharing.same(old, new):
        return
    folders = [sources.unpack("vllm", one).folder for one in (old, new)]
    was, now = (
        below.below(Sources(folder), sharing.targets_of(one))
        for folder, one in zip(folders, (old, new), strict=True)
    )
    differences: list[str] = []
    for name in below.changed(was, now):
        steps = (now.get(name) or was[name]).steps
        if steps >= len(NEAR):
            found.far += 1
            continue
        word = "gone" if name not in now else "new" if name not in was else "changed"
        found.functions.append(f"{NEAR[steps]}, {word}: {name}")
        texts = (text_of(folders[0], name, was), text_of(folders[1], name, now))
        differences += difflib.unified_diff(
            *texts, f"{old}/{name}", f"{new}/{name}", n=5, lineterm=""
        )
    found.text = "\n".join([*differences, ""])


def text_of(folder: Path, name: str, functions: Mapping[str, below.Function]) -> list[str]:
    """Return the lines of a function; none where a release does not have it."""
    if name not in functions:
        return []
    path = folder.joinpath(*name.partition(":")[0].split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
    first, last = functions[name].lines
    return file.read_text().splitlines()[first - 1 : last]


def signature(target: str, vllm: Signatures, kvcached: Signatures) -> str:
    """Return the signature of ``target`` in a release, in words."""
    return kvcached.targets.get(target) or vllm.targets.get(target) or "not there"
