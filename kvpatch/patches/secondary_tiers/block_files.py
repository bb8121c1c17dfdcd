"""Block files with checksums.

vLLM accepts any block file of the right length, so that a damaged one produces wrong tokens.
Here a file contains the block and one more page with a checksum over the block and the file
name. A file that fails the check is deleted, and its block is recomputed.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

# A whole page, because direct I/O requires whole pages.
SEAL = mmap.PAGESIZE
_MAGIC = b"kvpatch1"
_FIELDS = struct.Struct("<8sQI")
_PARTS_OF_NAME = 4  # the folder of the layout, two folders of the hash, the hash
_DIRECT = getattr(os, "O_DIRECT", 0)


def _seal(path: str, block: memoryview) -> bytes:
    """Return the fields that follow ``block`` in the file ``path``.

    They cover the name: a file in the place of another block or layout fails the check.
    """
    name = "/".join(path.split("/")[-_PARTS_OF_NAME:])
    checksum = zlib.crc32(block, zlib.crc32(name.encode()))
    return _FIELDS.pack(_MAGIC, len(block), checksum)


def _bounds(view: memoryview, offset: int, size: int) -> slice:
    # A memoryview would silently clip the slice.
    if offset < 0 or offset + size > view.nbytes:
        raise ValueError(f"block at {offset} of {size} bytes is outside {view.nbytes} bytes")
    return slice(offset, offset + size)


def make_private_folders(path: Path) -> None:
    """Create ``path`` and its missing parents for this user only."""
    if path.is_dir():
        return
    make_private_folders(path.parent)
    with suppress(FileExistsError):
        path.mkdir(0o700)


def _create(path: str, flags: int) -> int:
    flags |= os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        make_private_folders(Path(path).parent)
        return os.open(path, flags, 0o600)


def store_blocks(
    paths: list[str],
    view: memoryview,
    offsets: list[int],
    block_size: int,
    use_o_direct: bool = True,
) -> None:
    """Write blocks to files, each completely or not at all; existing files are kept.

    Replaces vLLM's ``batch_store_block``.

    Args:
        paths: one file per block.
        view: the memory of the primary tier.
        offsets: the start of each block in ``view``, in bytes.
        block_size: bytes per block; whole pages for direct I/O.
        use_o_direct: bypass the page cache.

    Raises:
        OSError: a block could not be written; the blocks before it were.
        ValueError: a block is outside ``view``.
    """
    with view.cast("B") as memory, mmap.mmap(-1, SEAL) as page:
        for path, offset in zip(paths, offsets, strict=True):
            if Path(path).exists():
                continue
            with memory[_bounds(memory, offset, block_size)] as block:
                page[: _FIELDS.size] = _seal(path, block)
                _write(path, [block, page], _DIRECT if use_o_direct else 0)


def _write(path: str, parts: list[Any], flags: int) -> None:
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"  # several machines may share the folder
    try:
        file = _create(temporary, flags)
        try:
            size = sum(len(part) for part in parts)
            if os.writev(file, parts) != size:
                raise OSError(errno.ENOSPC, "the block was not written whole", path)
        finally:
            os.close(file)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise


def load_blocks(
    paths: list[str],
    view: memoryview,
    offsets: list[int],
    block_size: int,
    use_o_direct: bool = True,
) -> None:
    """Read blocks from files, up to the first that is missing or fails the check.

    Replaces vLLM's ``batch_load_block``; the arguments are those of ``store_blocks``. A file
    that fails the check is deleted.

    Raises:
        OSError: a block could not be read; ``num_succeeded`` counts the blocks before it.
        ValueError: a block is outside ``view``.
    """
    with view.cast("B") as memory, mmap.mmap(-1, SEAL) as page:
        for position, (path, offset) in enumerate(zip(paths, offsets, strict=True)):
            with memory[_bounds(memory, offset, block_size)] as block:
                try:
                    _read(path, block, page, _DIRECT if use_o_direct else 0)
                except OSError as error:
                    error.num_succeeded = position  # type: ignore[attr-defined]
                    raise


def _read(path: str, block: memoryview, page: mmap.mmap, flags: int) -> None:
    file = os.open(path, os.O_RDONLY | flags)
    try:
        whole = os.readv(file, [block, page]) == len(block) + SEAL
    finally:
        os.close(file)
    if not whole or page[: _FIELDS.size] != _seal(path, block):
        with suppress(OSError):
            Path(path).unlink()
        raise OSError(errno.EIO, "the file does not hold the bytes that were stored", path)


def replace_store(original: Any) -> Any:
    """Return ``store_blocks`` for vLLM's own function."""
    return store_blocks


def replace_load(original: Any) -> Any:
    """Return ``load_blocks`` for vLLM's own function."""
    return load_blocks
