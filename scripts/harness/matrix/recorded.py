"""The recorded runs, and the code that they ran on.

``engine``, ``features``, ``synchronous`` and ``bytes`` have one file per
release of vLLM: its runs, and the code they ran on. Engines schedule asynchronously, as on a GPU,
but for ``synchronous``; those of ``features`` have more turned on than a connector, and
those of ``tried`` what is no axis, or two settings together.
``npu`` has engines of vllm-ascend on the ACL emulator, which validate no other cell.
A code is a commit and the units that were executed: functions, constants, rows and files, each
with a digest. ``units.json`` has lists of them, and a code has a bit for each of a list. A list is
named by a digest of what is in it and never changes, and a code by what it stands for. So what two
checkouts recorded is right when git merges it, or is refused here.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from harness.console import HarnessError
from harness.matrix import axes
from harness.matrix.shapes import DATA
from kvpatch.matrix.verdicts import NONE, Cell

LEVELS = ("engine", "synchronous", "bytes")
FEATURES = "features"  # the folder of engine runs with one of the features
TRIED = "tried"  # and with one or two of the settings that are no axis
FOLDERS = (LEVELS[0], FEATURES, TRIED, *LEVELS[1:])
NPU = "npu"  # the folder and level of engines on the ACL emulator
UNITS = "units.json"
_REPAIR = "scripts/matrix repair takes it from the history"
Lists = Mapping[str, Sequence[str]]  # of units, by their digests
ROW = "row:"  # before the id of a patch, in the name of its unit


@dataclass(frozen=True)
class Code:
    """The code that a run ran on.

    Attributes:
        bits: of each list of units, those that were executed, see ``encode``; empty if that was
            not recorded.
        lists: the lists of units, by their digests.
        installed: whether it was in place or from its wheel.
        key: a digest of what it stands for, see ``key_of``; empty if that was not recorded.
    """

    commit: str
    bits: Mapping[str, str]
    lists: Lists
    installed: str = ""
    key: str = ""

    @cached_property
    def units(self) -> Mapping[str, str]:
        """The digests of the units that were executed, by name.

        Raises:
            HarnessError: they are others than those that were recorded, or one is there twice.
        """
        found = named(self.bits, self.lists)
        if self.key and self.key != key_of(self.commit, self.installed, found):
            raise HarnessError(
                f"the units of the code {self.key} of {DATA} are not those that it was recorded "
                "with: take its lines whole from the commit that recorded it"
            )
        units = dict(one.split(" ") for one in found)
        if len(units) < len(found):
            raise HarnessError(
                f"the code {self.key} of {DATA} names a unit twice, with two digests: {_REPAIR}"
            )
        return units

    @property
    def patches(self) -> frozenset[str]:
        """The ids of the patches that were in force."""
        return frozenset(name.removeprefix(ROW) for name in self.units if name.startswith(ROW))


NOT_RECORDED = Code("", {}, {})


def digest_of(lines: Iterable[str]) -> str:
    """Return the digest of some lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def key_of(commit: str, installed: str, units: Iterable[str]) -> str:
    """Return the name of a code: a digest of what it stands for, in whatever lists it is."""
    return digest_of([commit, installed, *sorted(units)])


def lists(data: Path) -> dict[str, list[str]]:
    """Return the lists of units, by their digests.

    Raises:
        HarnessError: one of them was changed.
    """
    path = data / UNITS
    found: dict[str, list[str]] = json.loads(path.read_text()) if path.exists() else {}
    for name, units in found.items():
        if name != digest_of(units):
            raise HarnessError(f"{path}: the list {name} was changed: {_REPAIR}")
    return found


def named(bits: Mapping[str, str], of: Lists) -> list[str]:
    """Return the units that bits of lists stand for."""
    return [of[name][at] for name, text in bits.items() for at in decode(text)]


def bits_of(units: Iterable[str], of: Lists) -> dict[str, str]:
    """Return the bits of lists that stand for units, each of which is in one of them."""
    left, found = set(units), {}
    for name, listed in of.items():
        if mine := [at for at, unit in enumerate(listed) if unit in left]:
            found[name] = encode(mine)
            left.difference_update(listed)
    return found


def encode(numbers: Iterable[int]) -> str:
    """Return a set of numbers as text: its bits, compressed."""
    bits = sum(1 << number for number in set(numbers))
    raw = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    return base64.b85encode(zlib.compress(raw, 9)).decode()


def decode(text: str) -> list[int]:
    """Return the numbers of a text of ``encode``, in order."""
    raw = zlib.decompress(base64.b85decode(text)) if text else b""
    return [8 * at + bit for at, byte in enumerate(raw) for bit in range(8) if byte >> bit & 1]


@dataclass(frozen=True)
class Run:
    """One recorded run of a cell.

    Attributes:
        level: one of ``LEVELS``.
        right: whether all comparisons were equal.
    """

    level: str
    right: bool
    file: str
    code: Code


@cache
def runs(data: Path = DATA) -> dict[Cell, list[Run]]:
    """Return the recorded runs by cell, engine runs first."""
    return _read(data, FOLDERS)


@cache
def on_npu(data: Path = DATA) -> dict[Cell, list[Run]]:
    """Return the recorded runs of vllm-ascend on the ACL emulator, by cell."""
    return _read(data, (NPU,))


def _read(data: Path, folders: Iterable[str]) -> dict[Cell, list[Run]]:
    found: dict[Cell, list[Run]] = {}
    of = lists(data)
    for folder in folders:
        level = LEVELS[0] if folder in (FEATURES, TRIED) else folder
        for path in sorted((data / folder).glob("*.json")):
            result: dict[str, Any] = json.loads(path.read_text())
            codes = {
                key: _code(key, code, of, path) for key, code in result.get("code", {}).items()
            }
            for run in result["runs"]:
                axes = {name: run[name] for name in ("runner", "layout", "connector", "model")}
                cell = Cell(vllm=result["vllm"], **axes, feature=run.get("feature", NONE))
                made = Run(
                    level,
                    run["right"],
                    f"{folder}/{path.name}",
                    codes.get(run.get("code"), NOT_RECORDED),
                )
                found.setdefault(cell, []).append(made)
    return found


def _code(key: str, code: Mapping[str, Any], of: Lists, path: Path) -> Code:
    bits = code.get("units", {})
    for name in bits:
        if name not in of:
            raise HarnessError(f"{path} names the list of units {name}, which is gone: {_REPAIR}")
    return Code(code["commit"], bits, of, code.get("installed", ""), key if bits else "")


def folder_of(level: str, feature: str) -> str:
    """Return the folder of the runs of a level with what is turned on."""
    if level != LEVELS[0] or feature == NONE:
        return level
    return TRIED if feature in axes.TRIED else FEATURES


def forget() -> None:
    """Clear the cache of recorded runs."""
    runs.cache_clear()
    on_npu.cache_clear()
