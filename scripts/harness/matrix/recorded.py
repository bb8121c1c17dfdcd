"""The recorded runs, and the code that they ran on.

``engine``, ``features``, ``synchronous`` and ``bytes`` have one file per
release of vLLM: its runs, and the code they ran on. Engines schedule asynchronously, as on a GPU,
but for ``synchronous``; those of ``features`` have more turned on than a connector, and
those of ``tried`` what is no axis, or two settings together.
``npu`` has engines of vllm-ascend on the ACL emulator, which validate no other cell.
A code is a commit and the units that were executed: functions, constants, rows and files, each
with a digest. ``units.json`` lists all of them; a code has a bit for each.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from harness.matrix import axes, shapes
from kvpatch.matrix.verdicts import NONE, Cell

LEVELS = ("engine", "synchronous", "bytes")
FEATURES = "features"  # the folder of engine runs with one of the features
TRIED = "tried"  # and with one or two of the settings that are no axis
FOLDERS = (LEVELS[0], FEATURES, TRIED, *LEVELS[1:])
NPU = "npu"  # the folder and level of engines on the ACL emulator
UNITS = "units.json"
ROW = "row:"  # before the id of a patch, in the name of its unit


@dataclass(frozen=True)
class Code:
    """The code that a run ran on.

    Attributes:
        commit: the commit of the repository.
        bits: the units that were executed, see ``encode``; empty if that was not recorded.
        table: all units, in the order of the bits.
    """

    commit: str
    bits: str
    table: Sequence[str]

    @cached_property
    def units(self) -> Mapping[str, str]:
        """The digests of the units that were executed, by name."""
        found = [self.table[at] for at in decode(self.bits)]
        return dict(one.split(" ") for one in found)

    @property
    def patches(self) -> frozenset[str]:
        """The ids of the patches that were in force."""
        return frozenset(name.removeprefix(ROW) for name in self.units if name.startswith(ROW))


NOT_RECORDED = Code("", "", ())


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
        file: the result file.
        code: the code that it ran on.
    """

    level: str
    right: bool
    file: str
    code: Code


@cache
def runs(data: Path = shapes.DATA) -> dict[Cell, list[Run]]:
    """Return the recorded runs by cell, engine runs first."""
    return _read(data, FOLDERS)


@cache
def on_npu(data: Path = shapes.DATA) -> dict[Cell, list[Run]]:
    """Return the recorded runs of vllm-ascend on the ACL emulator, by cell."""
    return _read(data, (NPU,))


def _read(data: Path, folders: Iterable[str]) -> dict[Cell, list[Run]]:
    found: dict[Cell, list[Run]] = {}
    listed = data / UNITS
    table = tuple(json.loads(listed.read_text())) if listed.exists() else ()
    for folder in folders:
        level = LEVELS[0] if folder in (FEATURES, TRIED) else folder
        for path in sorted((data / folder).glob("*.json")):
            result: dict[str, Any] = json.loads(path.read_text())
            codes = {
                key: Code(code["commit"], code.get("units", ""), table)
                for key, code in result.get("code", {}).items()
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


def folder_of(level: str, feature: str) -> str:
    """Return the folder of the runs of a level with what is turned on."""
    if level != LEVELS[0] or feature == NONE:
        return level
    return TRIED if feature in axes.TRIED else FEATURES


def forget() -> None:
    """Clear the cache of recorded runs."""
    runs.cache_clear()
    on_npu.cache_clear()
