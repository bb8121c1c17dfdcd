"""What happens to disks, done to the folder of a tier while its engine runs."""

import os
import shutil
from pathlib import Path

_WRITEV = os.writev


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
    """Remove all files, and write no more than half of what is asked, as a full disk does."""
    remove(folder)

    def half(file: int, parts: list[memoryview]) -> int:
        return _WRITEV(file, [memoryview(parts[0])[: len(parts[0]) // 2]])

    os.writev = half  # type: ignore[assignment]


def empty(folder: Path) -> None:
    """Give the disk room again."""
    os.writev = _WRITEV
