"""Parts: folders of files that are no larger than asked, each with the sums of its files.

A file for which a part has no room goes on in the next one, as NAME.1of2 and NAME.2of2.
"""

import hashlib
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.console import HarnessError

SUMS = "SHA256SUMS"
MIB = 1 << 20
# Of every part, for the sums.
ROOM_FOR_SUMS = 4096
_PIECE = re.compile(r"(.+)\.(\d+)of(\d+)")


class Damaged(HarnessError):
    """A file is not what it was when its part was made."""


@dataclass(frozen=True)
class Piece:
    """Bytes ``begin`` to ``end`` of a file, under the name that they have in a part."""

    path: Path
    begin: int
    end: int
    name: str


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        found = hashlib.sha256()
        while block := file.read(MIB):
            found.update(block)
    return found.hexdigest()


def planned(groups: Iterable[Sequence[Path]], size: int) -> list[list[Piece]]:
    """Return the pieces of each part of at most ``size`` bytes; every group begins a part.

    Raises:
        HarnessError: the size has no room for a file.
    """
    room = size - ROOM_FOR_SUMS
    if room <= 0:
        raise HarnessError(f"parts of {size} bytes are too small; {ROOM_FOR_SUMS + 1} is the least")
    parts: list[list[Piece]] = []
    for group in groups:
        left = 0
        for path in group:
            spans: list[tuple[int, int, int]] = []
            begin, whole = 0, path.stat().st_size
            while begin < whole or not spans:  # an empty one too
                if not left:
                    left = room
                    parts.append([])
                end = min(whole, begin + left)
                spans.append((len(parts) - 1, begin, end))
                left -= end - begin
                begin = end
            for number, (part, first, last) in enumerate(spans, 1):
                name = path.name if len(spans) == 1 else f"{path.name}.{number}of{len(spans)}"
                parts[part].append(Piece(path, first, last, name))
    return parts


def write(pieces: Iterable[Piece], folder: Path) -> None:
    """Write a part anew: its pieces, and the sums that ``sha256sum -c`` reads."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sums = []
    for piece in pieces:
        with piece.path.open("rb") as file:
            file.seek(piece.begin)
            (folder / piece.name).write_bytes(file.read(piece.end - piece.begin))
        sums.append(f"{digest(folder / piece.name)}  {piece.name}\n")
    (folder / SUMS).write_text("".join(sums))


def read_sums(path: Path) -> dict[str, str]:
    """Return the sums of a file of them, by name.

    Raises:
        Damaged: it cannot be read, or has a line that is none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read ({error})") from error
    found = {}
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if match is None:
            raise Damaged(f"{path} has a line that is no sum: {line[:80]!r}")
        found[match[2]] = match[1]
    return found


def check(folder: Path, sums: Path) -> None:
    """Compare files in a folder with their sums.

    Raises:
        Damaged: one of them is missing or another.
    """
    for name, wanted in read_sums(sums).items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        if digest(path) != wanted:
            raise Damaged(f"{path} is damaged: its sum is not the one in {sums}")


def join(folder: Path) -> list[str]:
    """Put the pieces of a folder together; return the names of files of which some are missing."""
    found: dict[tuple[str, int], dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := _PIECE.fullmatch(path.name):
            found.setdefault((match[1], int(match[3])), {})[int(match[2])] = path
    missing = []
    for (name, count), pieces in sorted(found.items()):
        if len(pieces) < count:
            missing.append(name)
            continue
        partial = folder / f"{name}.part"
        with partial.open("wb") as whole:
            for number in range(1, count + 1):
                with pieces[number].open("rb") as piece:
                    shutil.copyfileobj(piece, whole)
        partial.replace(folder / name)
        for path in pieces.values():
            path.unlink()
    return missing
