"""Archives that the standard library opens: tar in xz, with the sums of their libraries beside."""

import lzma
import tarfile
from pathlib import Path

from harness.gpu.parts import MIB, digest

ENDING = ".tar.xz"
# Kernels of one library are much alike, at distances of up to its size.
WINDOW = 192 * MIB
LEAST = 4096


def pack(folder: Path, archive: Path) -> None:
    """Pack a folder's files; nothing is at ``archive`` before it is whole."""
    names = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    libraries = [name for name in names if ".so" in Path(name).suffixes]
    lines = [f"{digest(folder / name)}  {name}\n" for name in libraries]
    sums_of(archive).write_text("".join(lines))
    size = sum((folder / name).stat().st_size for name in names)
    window = min(WINDOW, max(LEAST, size))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": window}]
    partial = archive.with_suffix(".part")
    with (
        lzma.open(partial, "wb", filters=filters) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for name in names:
            tar.add(folder / name, name, recursive=False)
    partial.replace(archive)


def sums_of(archive: Path) -> Path:
    """Return the file with the sums of an archive's libraries."""
    return archive.with_name(archive.name.removesuffix(ENDING) + ".sums")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a folder.

    Raises:
        lzma.LZMAError, tarfile.TarError, OSError: it is no archive, or there is no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with lzma.open(archive) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
        tar.extractall(folder, filter="data")
