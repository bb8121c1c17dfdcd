"""Results of the matrix, written to kvpatch/matrix/data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.matrix import sources
from harness.matrix.signatures import Sources
from kvpatch.matrix import signatures
from kvpatch.matrix.signatures import Signatures


def read_shapes(source: sources.Source) -> Signatures:
    """Return the signature of every target in unpacked sources."""
    tree = Sources(source.folder)
    found: dict[str, str | None] = {}
    for target in signatures.targets():
        if target.startswith(f"{source.package}."):
            found[target] = tree.signature(target)
        elif source.package == "kvcached" and (added := tree.added(target)) is not None:
            found[target] = added
    return Signatures(source.package, source.version, source.archive, source.sha256, found)


def record_shapes(package: str, version: str, archives: Path | None = None) -> Signatures:
    """Unpack a release and record the signature of every target."""
    made = read_shapes(sources.unpack(package, version, archives))
    write(signatures.DATA / "signatures" / f"{package}-{version}.json", vars(made))
    return made


def record_runs(level: str, result: dict[str, Any]) -> None:
    """Write runs of one release; they take the place of the same cells' earlier runs."""
    path = signatures.DATA / level / f"vllm-{result['vllm']}-kvcached-{result['kvcached']}.json"
    earlier = json.loads(path.read_text())["runs"] if path.exists() else []
    done = {_axes(run): run for run in [*earlier, *result["runs"]]}
    write(path, result | {"runs": [done[key] for key in sorted(done)]})


def _axes(run: dict[str, Any]) -> tuple[str, ...]:
    return tuple(run[name] for name in ("connector", "runner", "layout", "model"))


def write(path: Path, content: dict[str, Any]) -> None:
    """Write one result file; a small change makes a small difference."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(content, indent=1)}\n")
