"""Code for GPUs in a shared library: what a device of compute capability 9.0 does not run.

Such a library has containers (``.nv_fatbin``), each with entries: machine code for one
architecture, or PTX that the driver compiles. Blanking an entry's bytes moves nothing, and what is
blank takes no room in an archive.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from harness.console import HarnessError

SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
HOPPER = 90
_PTX, _CODE = 1, 2
_MAGIC = 0xBA55ED50
_CONTAINER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
_ARCHITECTURE = 28  # bytes into an entry's header


class Span(NamedTuple):
    """Bytes of a library."""

    begin: int
    size: int


class _Entry(NamedTuple):
    kind: int
    architecture: int
    span: Span


def others(library: bytes, architecture: int = HOPPER) -> list[Span]:
    """Return the spans of a library that a device does not run.

    In each container it runs machine code of its architecture, and where there is none the newest
    PTX that is not for a later one.

    Raises:
        HarnessError: a container has entries that are not understood.
    """
    found = []
    for section in _sections(library):
        for entries in _containers(library, section):
            code = [one for one in entries if one[:2] == (_CODE, architecture)]
            ptx = [one for one in entries if one.kind == _PTX and one.architecture <= architecture]
            runs = code or sorted(ptx, key=lambda one: one.architecture)[-1:]
            found += [one.span for one in entries if one not in runs]
    return found


def blanked(library: bytes, spans: list[Span]) -> bytes:
    """Return a library with zeros in spans of it."""
    changed = bytearray(library)
    for begin, size in spans:
        changed[begin : begin + size] = bytes(size)
    return bytes(changed)


def _sections(library: bytes) -> Iterator[Span]:
    """Yield the sections of an ELF file of 64 bits that have code for GPUs."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", library, table + number * size) for number in range(count)
    ]
    names = headers[of_names][4]
    for name, _, _, _, begin, length in headers:
        end = library.index(b"\0", names + name)
        if library[names + name : end] in SECTIONS:
            yield Span(begin, length)


def _containers(library: bytes, section: Span) -> Iterator[list[_Entry]]:
    at, end = section.begin, section.begin + section.size
    while at + _CONTAINER.size <= end:
        magic, _, header, size = _CONTAINER.unpack_from(library, at)
        if magic != _MAGIC:
            at += 8  # they are aligned
            continue
        yield list(_entries(library, Span(at + header, size)))
        at += header + size


def _entries(library: bytes, container: Span) -> Iterator[_Entry]:
    at, end = container.begin, container.begin + container.size
    while at + _ENTRY.size < end:
        kind, _, header, size = _ENTRY.unpack_from(library, at)
        if kind not in (_PTX, _CODE) or at + header + size > end:
            raise HarnessError(f"code for GPUs at byte {at} is not understood (kind {kind})")
        (architecture,) = struct.unpack_from("<I", library, at + _ARCHITECTURE)
        yield _Entry(kind, architecture, Span(at + header, size))
        at += header + size
