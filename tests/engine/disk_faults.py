"""What happens to disks, done to the folder of a tier while its engine runs."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

_NO_LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)


def _blocks(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.bin"))


def nothing(folder: Path) -> None:
    """Leave the disk as it is."""


def truncate(folder: Path) -> None:
    """Cut every file in half."""
    for file in _blocks(folder):
        os.truncate(file, file.stat().st_size // 2)


def flip(folder: Path) -> None:
    """Change one bit in the middle of every file."""
    for file in _blocks(folder):
        with file.open("r+b") as data:
            data.seek(file.stat().st_size // 3)
            byte = data.read(1)
            data.seek(-1, os.SEEK_CUR)
            data.write(bytes([byte[0] ^ 4]))


def remove(folder: Path) -> None:
    """Remove the folder."""
    shutil.rmtree(folder)


def hang(folder: Path) -> None:
    """Put pipes in the files' places: whoever opens one waits for a writer."""
    for file in _blocks(folder):
        file.rename(file.with_suffix(".kept"))
        os.mkfifo(file)


def answer(folder: Path) -> None:
    """Let those go who wait for a writer."""
    for file in _blocks(folder):
        os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))


def put_back(folder: Path) -> None:
    """Put the files back in the places of the pipes."""
    for file in sorted(folder.rglob("*.kept")):
        file.rename(file.with_suffix(".bin"))


def fill(folder: Path) -> None:
    """Remove all files, and let no new one be longer than 64 KiB, as on a full disk."""
    remove(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, _NO_LIMIT[1]))


def empty(folder: Path) -> None:
    """Give the disk room again."""
    resource.setrlimit(resource.RLIMIT_FSIZE, _NO_LIMIT)
