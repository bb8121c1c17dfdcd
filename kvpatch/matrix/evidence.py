"""The recorded runs, and the code that they ran on.

``data/engine``, ``data/features``, ``data/synchronous`` and ``data/bytes`` have one file per
release of vLLM: its runs, and the code they ran on. Engines schedule asynchronously, as on a GPU,
but for ``data/synchronous``; those of ``data/features`` have more turned on than a connector.
``data/npu`` has engines of vllm-ascend on the ACL emulator, which validate no other cell.
A code is a commit, the ids of the patches that were in force, and a digest of each module that
those patches use. Docstrings and comments do not change a digest.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from kvpatch import patches
from kvpatch.matrix import signatures
from kvpatch.matrix.axes import NONE, Cell
from kvpatch.patch import WITH_SLEEP, WITH_TIERS

LEVELS = ("engine", "synchronous", "bytes")
FEATURES = "features"  # the folder of engine runs with one of the features
FOLDERS = (LEVELS[0], FEATURES, *LEVELS[1:])
NPU = "npu"  # the folder and level of engines on the ACL emulator
PACKAGE = Path(__file__).parents[1]
HEADERS = "kvpatch.hostdevice.include"
# What an NPU is in these runs: kvcached's calls of it, its memory, and its operators.
_EMULATOR = ("ascend/include", "hostdevice/acl", "hostdevice/npu")
# The connectors that have what a patch needs, by ``Patch.only_with``; no cell has sleep mode.
_WITH: dict[str, tuple[str, ...]] = {WITH_TIERS: ("tiering fs",), WITH_SLEEP: ()}
# Modules that moved as they were.
_MOVED = {"kvpatch.patches.sleep.weights": "kvpatch.patches.host_device.weights"}
# The packages whose modules run in an engine on behalf of a patch.
_CODE = ("kvpatch.patches", "kvpatch.upstream", "kvpatch.hostdevice", "kvpatch.state")


@dataclass(frozen=True)
class Code:
    """The code that a run ran on.

    Attributes:
        commit: the commit of the repository.
        patches: the ids of the patches that were in force, in order of application.
        digests: the digests by module.
    """

    commit: str
    patches: tuple[str, ...]
    digests: dict[str, str]

    def changed(self, cell: Cell) -> list[str]:
        """Return the modules that have changed since, of the patches that do anything in a cell.

        A module that none of these uses any more counts if it is gone: if it is not, another one
        has changed, which used it.
        """
        now = digests_of(one for one in self.patches if _acts(one, cell))
        return sorted(
            module
            for module in self.digests.keys() | now.keys()
            if self.digests.get(module) != now.get(module)
            and (module in now or not _path(_MOVED.get(module, module)).exists())
        )

    def gone(self, vllm: str) -> list[str]:
        """Return the patches that were in force then, and on that release are no more."""
        return sorted(set(self.patches) - self._rows(vllm))

    def came(self, vllm: str) -> set[str]:
        """Return the patches of a release that came since, of the features in force then."""
        return self._rows(vllm) - set(self.patches)

    def _rows(self, vllm: str) -> set[str]:
        """Return the patches that a release has today, of the features in force then."""
        then = set(self.patches)
        of_each = ({patch.id for patch in rows} for _, rows in patches.at(Version(vllm)))
        return set[str]().union(*(ids for ids in of_each if ids & then))


@dataclass(frozen=True)
class Run:
    """One recorded run of a cell.

    Attributes:
        level: one of ``LEVELS``.
        right: whether all comparisons were equal.
        file: the result file.
        code: the code that it ran on; None if that was not recorded.
    """

    level: str
    right: bool
    file: str
    code: Code | None


@cache
def runs(data: Path = signatures.DATA) -> dict[Cell, list[Run]]:
    """Return the recorded runs by cell, engine runs first."""
    return _read(data, FOLDERS)


@cache
def on_npu(data: Path = signatures.DATA) -> dict[Cell, list[Run]]:
    """Return the recorded runs of vllm-ascend on the ACL emulator, by cell."""
    return _read(data, (NPU,))


def _read(data: Path, folders: Iterable[str]) -> dict[Cell, list[Run]]:
    found: dict[Cell, list[Run]] = {}
    for folder in folders:
        level = LEVELS[0] if folder == FEATURES else folder
        for path in sorted((data / folder).glob("*.json")):
            result: dict[str, Any] = json.loads(path.read_text())
            codes = {
                key: Code(code["commit"], tuple(code["patches"]), code["digests"])
                for key, code in result.get("code", {}).items()
            }
            for run in result["runs"]:
                axes = {name: run[name] for name in ("runner", "layout", "connector", "model")}
                cell = Cell(vllm=result["vllm"], **axes, feature=run.get("feature", NONE))
                code = codes.get(run.get("code", ""))
                made = Run(level, run["right"], f"{folder}/{path.name}", code)
                found.setdefault(cell, []).append(made)
    return found


def stale(data: Path = signatures.DATA) -> Iterator[tuple[str, Cell, list[str]]]:
    """Yield the engine runs on other code than the current: level, cell and the changes.

    Those are modules, patches that are no more, and patches that came since. A run without a patch
    that came stands where the patch was in force in a current one, with the same release of vLLM,
    runner, layout and connector.
    """
    every = [
        (cell, run, run.code.changed(cell) if run.code else [])
        for cell, of_cell in (*runs(data).items(), *on_npu(data).items())
        for run in of_cell
        if run.level != "bytes"
    ]
    shown: dict[Cell, set[str]] = {}
    for cell, run, modules in every:
        if run.right and run.level == LEVELS[0] and run.code and not modules:
            shown.setdefault(_without_model(cell), set()).update(run.code.patches)
    for cell, run, modules in every:
        changed = ["the code was not recorded"]
        if run.code is not None:
            came = run.code.came(cell.vllm) - shown.get(_without_model(cell), set())
            came = {one for one in came if _acts(one, cell)}
            changed = [*modules, *run.code.gone(cell.vllm), *sorted(came)]
        if changed:
            yield run.level, cell, changed


def _acts(patch_id: str, cell: Cell) -> bool:
    """Return whether a patch can do anything in a cell, by what has to be configured for it."""
    return cell.connector in _WITH.get(_only_with().get(patch_id, ""), (cell.connector,))


@cache
def _only_with() -> dict[str, str]:
    every = (patch for one in patches.FEATURES for patch in one.patches)
    return {patch.id: patch.only_with for patch in every}


def _without_model(cell: Cell) -> Cell:
    """Return what stands for the cells of one release, runner, layout and connector."""
    return replace(cell, model="", feature=NONE)


def digests_of(ids: Iterable[str]) -> dict[str, str]:
    """Return a digest of every module that the patches use, by module name."""
    wrappers = {patch.id: patch.wrapper for one in patches.FEATURES for patch in one.patches}
    modules: set[str] = set()
    for patch_id in ids:
        if patch_id in wrappers:
            modules |= _used_by(wrappers[patch_id].partition(":")[0])
    on_host = any(module.startswith("kvpatch.hostdevice") for module in modules)
    if on_host:  # some of its modules are named by configurations, not by patches
        files = (PACKAGE / "hostdevice").glob("*.py")
        modules |= {f"kvpatch.hostdevice.{path.stem}" for path in files if path.stem[0] != "_"}
    found = {module: _digest(module) for module in modules}
    if on_host:
        found[HEADERS] = _headers()
    if any(module.startswith("kvpatch.patches.ascend.") for module in modules):
        found |= {f"kvpatch.{folder.replace('/', '.')}": _folder(folder) for folder in _EMULATOR}
    return dict(sorted(found.items()))


@cache
def _used_by(module: str) -> frozenset[str]:
    """Return a module and the modules of ``_CODE`` that it imports, directly or indirectly."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imports(name)
    return frozenset(found)


def _path(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


def _is_table(node: ast.stmt) -> bool:
    # Their texts change nothing, and which rows were in force is recorded by id.
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("FEATURE", "RULES")


@cache
def _tree(module: str) -> ast.Module:
    """Return the parsed module without its docstrings, rows and rules."""
    tree = ast.parse(_path(module).read_text())
    tree.body = [node for node in tree.body if not _is_table(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body[:1] = [ast.Pass()]
    return tree


def _imports(module: str) -> list[str]:
    found = []
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.startswith(_CODE) and _path(name).is_file()]


@cache
def _digest(module: str) -> str:
    return hashlib.sha256(ast.dump(_tree(module)).encode()).hexdigest()[:12]


@cache
def _headers() -> str:
    digest = hashlib.sha256()
    for path in sorted((PACKAGE / "hostdevice/include").iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def _folder(name: str) -> str:
    """Return a digest of every file in a folder of the package."""
    digest = hashlib.sha256()
    for path in sorted((PACKAGE / name).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def forget() -> None:
    """Clear the cache of recorded runs."""
    runs.cache_clear()
    on_npu.cache_clear()
