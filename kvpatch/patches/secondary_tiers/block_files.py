"""Block files with checksums.

vLLM accepts any block file of the right length, so that a damaged one produces wrong tokens.
Here a file contains the block and one more page with a checksum over the block and the file
name. A file that fails the check is deleted, and its block is recomputed.

A checksum proves no author. So a layout's folder must be this user's alone, and so must every
file in it.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvpatch.patches.secondary_tiers.timeout import progressed

# A whole page, because direct I/O requires whole pages.
SEAL = mmap.PAGESIZE
_MAGIC = b"kvpatch1"
FIELDS = struct.Struct("<8sQI")
PARTS_OF_NAME = 4  # the folder of the layout, two folders of the hash, the hash
_DIRECT = getattr(os, "O_DIRECT", 0)
# In a layout's folder: files that are being written. A folder of their own is quick to sweep.
TEMPORARY = "tmp"
ABANDONED = 3600.0  # seconds without a write, after which nobody writes a file any more


class Ledger:
    """What is told of every block file. This one keeps nothing: the tier has no size."""

    @property
    def kept(self) -> bool:
        """Whether files are removed to make room."""
        return False

    def reserve(self, path: str, size: int) -> None:
        """Make room for a file of ``size`` bytes that is about to be written, or raise OSError."""

    def use(self, path: str) -> None:
        """Note that a file was written, read or found."""

    def lost(self, path: str) -> None:
        """Note that a file could not be written or read."""

    def settle(self) -> None:
        """Tell other engines of what was used, without waiting for them."""


_thread = threading.local()
_NONE = Ledger()


@contextmanager
def noted_in(ledger: Ledger) -> Iterator[None]:
    """Note in a ledger what this thread does with block files."""
    _thread.ledger = ledger
    try:
        yield
    finally:
        _thread.ledger = _NONE
        with suppress(OSError):  # the bytes are right, and what was used is told later
            ledger.settle()


class Damaged(OSError):
    """A file that is not what was stored under its name; it is deleted."""


def seal(path: str, block: memoryview) -> bytes:
    """Return the fields that follow ``block`` in the file ``path``.

    They cover the name: a file in the place of another block or layout fails the check.
    """
    name = "/".join(path.split("/")[-PARTS_OF_NAME:])
    checksum = zlib.crc32(block, zlib.crc32(name.encode()))
    return FIELDS.pack(_MAGIC, len(block), checksum)


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


def own_folder(path: Path) -> None:
    """Create ``path`` for this user only, or check that an existing one is.

    Raises:
        OSError: it cannot be created, is a link, belongs to another user, or is open to others.
    """
    make_private_folders(path)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{path} is a link and not a folder")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to the user id {status.st_uid}")
    if status.st_mode & 0o077:
        raise PermissionError(f"{path} is open to other users")


def sweep(folder: Path) -> int:
    """Delete the files that killed engines were writing to a layout's folder; return how many.

    Other engines may be writing there: only files that have not grown for long are deleted.
    """
    swept, before = 0, time.time() - ABANDONED
    with suppress(OSError), os.scandir(folder / TEMPORARY) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < before:
                    Path(entry).unlink()
                    swept += 1
    return swept


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
    ledger = getattr(_thread, "ledger", _NONE)
    with view.cast("B") as memory, mmap.mmap(-1, SEAL) as page:
        for path, offset in zip(paths, offsets, strict=True):
            if os.path.lexists(path):
                ledger.use(path)
                progressed(0)
                continue
            with memory[_bounds(memory, offset, block_size)] as block:
                ledger.reserve(path, block_size + SEAL)
                page[: FIELDS.size] = seal(path, block)
                try:
                    _write(path, [block, page], _DIRECT if use_o_direct else 0)
                except BaseException:
                    ledger.lost(path)
                    raise
            ledger.use(path)
            progressed(block_size)


def _in_folders(path: str, use: Callable[[], Any]) -> Any:
    """Call ``use``; if the folder of ``path`` is missing, create it and call again."""
    for _ in range(3):  # an engine that makes room removes empty folders
        with suppress(FileNotFoundError):
            return use()
        with suppress(FileNotFoundError):
            make_private_folders(Path(path).parent)
    return use()


def _write(path: str, parts: list[Any], flags: int) -> None:
    layout, *_, name = path.rsplit("/", PARTS_OF_NAME - 1)
    # Several machines may share the folder.
    temporary = f"{layout}/{TEMPORARY}/{name}.{secrets.token_hex(8)}"
    flags |= os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
    try:
        file = _in_folders(temporary, lambda: os.open(temporary, flags, 0o600))
        try:
            size = sum(len(part) for part in parts)
            if os.writev(file, parts) != size:
                raise OSError(
                    errno.ENOSPC, "the disk is full, and the block was not written whole", path
                )
        finally:
            os.close(file)
        _in_folders(path, lambda: Path(temporary).replace(path))
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
    ledger = getattr(_thread, "ledger", _NONE)
    with view.cast("B") as memory, mmap.mmap(-1, SEAL) as page:
        for position, (path, offset) in enumerate(zip(paths, offsets, strict=True)):
            with memory[_bounds(memory, offset, block_size)] as block:
                try:
                    _read(path, block, page, _DIRECT if use_o_direct else 0)
                except OSError as error:
                    ledger.lost(path)
                    error.num_succeeded = position  # type: ignore[attr-defined]
                    raise
            ledger.use(path)
            progressed(block_size)


def _read(path: str, block: memoryview, page: mmap.mmap, flags: int) -> None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            _refuse(path)
        raise
    try:
        status = os.fstat(file)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        whole = ours and os.readv(file, [block, page]) == len(block) + SEAL
    finally:
        os.close(file)
    if not whole or page[: FIELDS.size] != seal(path, block):
        _refuse(path)


def _refuse(path: str) -> None:
    """Delete a file that is not what was stored under its name, and raise Damaged."""
    with suppress(OSError):
        Path(path).unlink()
    raise Damaged(errno.EIO, "the file does not hold the bytes that were stored", path)


def replace_store(original: Any) -> Any:
    """Return ``store_blocks`` for vLLM's own function."""
    return store_blocks


def replace_load(original: Any) -> Any:
    """Return ``load_blocks`` for vLLM's own function."""
    return load_blocks
