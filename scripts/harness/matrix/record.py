"""Results of the matrix, written to kvpatch/matrix/data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness import ROOT, provenance
from harness.matrix import below, sources
from harness.matrix.signatures import Sources
from kvpatch import supported
from kvpatch.matrix import evidence, plain, sharing, signatures
from kvpatch.matrix.signatures import Signatures
from kvpatch.versions import Span

# Of the checkout, also where kvpatch is installed from its wheel, which has a copy.
DATA = ROOT / "kvpatch/matrix/data"


def read_signatures(source: sources.Source) -> Signatures:
    """Return the signature of every target in unpacked sources."""
    tree = Sources(source.folder)
    found: dict[str, str | None] = {}
    for target in signatures.targets():
        if target.startswith(f"{source.package}."):
            found[target] = tree.signature(target)
        elif source.package == "kvcached" and (added := tree.added(target)) is not None:
            found[target] = added
    return Signatures(source.package, source.version, source.archive, source.sha256, found)


def record_signatures(package: str, version: str, archives: Path | None = None) -> Signatures:
    """Unpack a release and record the signature of every target, and what is below them."""
    source = sources.unpack(package, version, archives)
    made = read_signatures(source)
    write(DATA / "signatures" / f"{package}-{version}.json", vars(made))
    if package == "vllm" and Version(version) in Span(supported.FLOOR):
        functions = below.below(Sources(source.folder), sharing.targets_of(version))
        found = sharing.Below(
            vllm=version,
            functions=len(functions),
            digest=below.digest(functions),
            targets=sharing.targets_digest(version),
        )
        write(DATA / sharing.LEVEL / f"vllm-{version}.json", found._asdict())
    return made


def record_run(
    level: str, head: dict[str, Any], run: dict[str, Any], patches: Iterable[str]
) -> None:
    """Write a run of one release; it takes the place of the same cell's earlier run.

    Args:
        level: ``engine`` or ``bytes``.
        head: what is said of the release's newest run: versions, machine, command.
        run: the axes of its cell, without ``feature`` where it has none, and the outcome.
        patches: the ids of the patches that were in force.
    """
    has_feature = "feature" in run
    folder = evidence.FEATURES if has_feature and level == evidence.LEVELS[0] else level
    path = DATA / folder / f"vllm-{head['vllm']}-kvcached-{head['kvcached']}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {"runs": []}
    ran_on = {
        "commit": provenance.commit(),
        "installed": provenance.installed(),
        "patches": list(patches),
        "digests": evidence.digests_of(patches),
    }
    key = hashlib.sha256(json.dumps(ran_on).encode()).hexdigest()[:8]
    done = {_axes(one): one for one in [*earlier["runs"], run | {"code": key}]}
    runs = [done[cell] for cell in sorted(done)]
    codes = earlier.get("code", {}) | {key: ran_on}
    used = {one.get("code") for one in runs}
    write(path, head | {"code": {k: codes[k] for k in sorted(codes) if k in used}, "runs": runs})


def record_plain(head: dict[str, Any], run: dict[str, Any]) -> None:
    """Write a run of plain vLLM; it takes the place of the same combination's earlier run."""
    path = DATA / plain.LEVEL / f"vllm-{head['vllm']}.json"
    earlier = json.loads(path.read_text())["runs"] if path.exists() else []
    names = ("runner", "model", "feature")
    done = {tuple(one[name] for name in names): one for one in [*earlier, run]}
    write(path, head | {"commit": provenance.commit(), "runs": [done[one] for one in sorted(done)]})


def _axes(run: dict[str, Any]) -> tuple[str, ...]:
    names = ("connector", "runner", "layout", "model")
    return (run.get("feature", ""), *(run[name] for name in names))


def write(path: Path, content: dict[str, Any]) -> None:
    """Write one result file; a small change makes a small difference."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(content, indent=1)}\n")
