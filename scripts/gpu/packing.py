"""Packs: zip files under a limit, so that each can be carried to a machine without a network."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT = 64 << 20
MARGIN = 6 << 20  # for the index, and for the tree, which may travel with a pack
LISTING = "packs.json"


class PackError(Exception):
    """The packs cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Part:
    """A file to carry.

    Attributes:
        name: where it will lie, relative to where the packs are opened.
        source: where it lies now.
        stage: the first stage that needs it: 1 for the transfers, 2 for the engines.
    """

    name: str
    source: Path
    stage: int = 1


def packed_size(part: Part, folder: Path) -> int:
    """Return the bytes of a part in a pack, found by packing it."""
    with zipfile.ZipFile(folder / "measured.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.write(part.source, part.name)
        return file.infolist()[0].compress_size + 2 * len(part.name) + 256


def divide(sizes: Sequence[tuple[Part, int]], limit: int = LIMIT - MARGIN) -> list[list[Part]]:
    """Divide parts into packs: those of the first stage first, in as few as it goes by size.

    Raises:
        PackError: a part is larger than a pack.
    """
    packs: list[tuple[int, list[Part]]] = []
    begun = 0
    for stage in sorted({part.stage for part, _ in sizes}):
        of_stage = [(part, size) for part, size in sizes if part.stage == stage]
        for part, size in sorted(of_stage, key=lambda one: (-one[1], one[0].name)):
            if size > limit:
                raise PackError(
                    f"{part.name} takes {size >> 20} MiB and a pack may have {limit >> 20}; "
                    "leave it out or carry it in pieces"
                )
            for at in range(begun, len(packs)):
                if packs[at][0] + size <= limit:
                    packs[at] = (packs[at][0] + size, [*packs[at][1], part])
                    break
            else:
                packs.append((size, [part]))
        # What the first stage needs must not wait in a later stage's pack.
        begun = max(0, len(packs) - 1)
    return [parts for _, parts in packs]


def write(packs: Iterable[Sequence[Part]], folder: Path, limit: int = LIMIT) -> list[Path]:
    """Write the packs, and a listing with their sums.

    Raises:
        PackError: a pack came out larger than the limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, parts in enumerate(packs, 1):
        path = folder / f"pack-{number}.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for part in parts:
                file.write(part.source, part.name)
        if path.stat().st_size > limit:
            raise PackError(f"{path.name} has {path.stat().st_size >> 20} MiB and may have {limit}")
        written.append(path)
    listing = {
        path.name: {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
            "stages": sorted({part.stage for part in parts}),
        }
        for path, parts in zip(written, packs, strict=True)
    }
    (folder / LISTING).write_text(json.dumps(listing, indent=1) + "\n")
    return written


def unpack(folder: Path, target: Path) -> list[str]:
    """Open the packs that are there, checked by their sums; return their names.

    Raises:
        PackError: there is no listing, or a pack is not what was packed.
    """
    if not (folder / LISTING).exists():
        raise PackError(f"there are no packs in {folder}; make them with scripts/gpu/pack")
    opened = []
    for name, about in json.loads((folder / LISTING).read_text()).items():
        path = folder / name
        if not path.exists():
            continue  # a later stage's, which follows
        if hashlib.sha256(path.read_bytes()).hexdigest() != about["sha256"]:
            raise PackError(f"{name} is not what was packed; carry it again")
        with zipfile.ZipFile(path) as file:
            file.extractall(target)
        opened.append(name)
    return opened
