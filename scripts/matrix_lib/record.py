"""Writing what a level found into kvpatch/matrix/data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpatch.matrix import shapes
from matrix_lib import sources
from matrix_lib.signatures import Sources


def read_shapes(source: sources.Source) -> shapes.Shapes:
    """Look every target of the registry up in unpacked sources."""
    tree = Sources(source.folder)
    said: dict[str, str | None] = {}
    for target in shapes.targets():
        if target.startswith(f"{source.package}."):
            said[target] = tree.signature(target)
        elif source.package == "kvcached" and (added := tree.grafted(target)) is not None:
            said[target] = added
    return shapes.Shapes(source.package, source.version, source.archive, source.sha256, said)


def record_shapes(package: str, version: str, archives: Path | None = None) -> shapes.Shapes:
    """Unpack a release, look every target up and write its file."""
    made = read_shapes(sources.unpack(package, version, archives))
    write(shapes.DATA / "shapes" / f"{package}-{version}.json", vars(made))
    return made


def write(path: Path, content: dict[str, Any]) -> None:
    """Write one result file, in the form that makes small differences small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(content, indent=1)}\n")
