"""Units of code: functions, classes, constants, rows and files, each with a digest.

A unit is what a change is told by: a function or method, a class without its methods, a constant,
one rule of a table, a row of a feature, a header. Its digest is of its syntax without docstrings
and annotations, without the texts of refusals, rules and log lines, and with what the imported
names in it stand for. So words change nothing, and another function of the same name does.

A unit's name is ``module:path``, ``row:id``, ``feature:name`` or ``file:path``.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from harness import ROOT
from kvpatch import patches
from kvpatch.patch import Feature, Patch

# What is called with texts for people, and from which argument on: their wording is no part of a
# unit.
_TOLD = {
    **dict.fromkeys(("Refusal", "RefusedCall", "RefusedImport", "Halted", "Rule", "Code"), 0),
    **dict.fromkeys(("_setup", "_not_validated", "_incompatible", "say", "print"), 0),
    "Variable": 1,
}
BODY = "<body>"  # the path of a module's statements that define nothing
_LOGGERS = ("log", "logger")
_TABLES = frozenset(("feature", "Row", "gap"))  # whose rows are units of their own
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINES = (ast.Import, ast.ImportFrom, ast.Pass)
# What kvcached is compiled against on the host device, and on the ACL emulator.
_NATIVE = ("hostdevice/include", "hostdevice/acl", "hostdevice/npu", "ascend/include")


class Part(NamedTuple):
    """One definition of a unit: a property has two, and so has what each of two branches defines.

    Attributes:
        text: its syntax without words.
        used: what the names in it stand for, ``module`` or ``module:name``, where that is imported
            or of its own module.
        own: those of its own module.
    """

    text: str
    used: Mapping[str, str]
    own: frozenset[str]


class Unit(NamedTuple):
    """One unit of a module.

    Attributes:
        names: the constants and classes that it names, as units.
        is_function: whether it is executed when it is called; what is named is executed with it.
        parts: what its digest is of: its definitions.
    """

    digest: str
    lines: tuple[int, int]
    names: frozenset[str]
    is_function: bool
    parts: tuple[Part, ...]


Units = dict[str, Unit]


class Tree:
    """The units of one checkout."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        folders = (("kvpatch", root), ("scripts/harness", root / "scripts"))
        self.files = {
            _module(path.relative_to(base)): path
            for folder, base in folders
            for path in sorted((root / folder).rglob("*.py"))
        }
        self._of: dict[str, Units] = {}

    def of_module(self, name: str) -> Units:
        """Return the units of a module, by their names."""
        if name not in self._of:
            self._of[name] = of_text(name, self.files[name].read_text())
        return self._of[name]

    def changed(self, file: str, text: str) -> Tree:
        """Return the tree in which a file of the repository has another text."""
        name = _module(Path(file.removeprefix("scripts/")))
        made = copy(self)
        made._of = self._of | {name: of_text(name, text)}
        vars(made).pop("_places", None)
        return made

    def get(self, name: str) -> Unit | None:
        """Return the unit of a name, or None if there is none."""
        module = name.partition(":")[0]
        return self.of_module(module).get(name) if module in self.files else None

    def followed(self, then: Mapping[str, str]) -> Mapping[str, str]:
        """Return digests of units then by the names that they have today, if they have moved.

        What its module no longer has is followed to the one other module with the same code under
        the same path. It has today's digest, and so has what differs by its import alone. What
        several modules have is followed to none.
        """
        back: dict[str, str] = {}  # by today's name, that of then
        for old in then:
            module, _, path = old.partition(":")
            if "." in module and path != BODY and self.get(old) is None:
                for new in self._places.get(path, ()):
                    if new not in then:
                        back.setdefault(new, old)
        while back:
            wrong = [new for new, old in back.items() if self._as_in(new, old, back) != then[old]]
            often = Counter(back.values())
            wrong = wrong or [new for new, old in back.items() if often[old] > 1]
            if not wrong:
                break
            for new in wrong:
                del back[new]
        if not back:
            return then
        moved = {old: new for new, old in back.items()}
        for old in then.keys() - moved.keys():
            # A class may have moved with a method that is another one, as if it had not moved.
            module, _, path = old.partition(":")
            home, _, owner = moved.get(f"{module}:{path.partition('.')[0]}", "").partition(":")
            if owner and self.get(new := f"{home}:{path}") is not None:
                moved[old] = new
        found = {}
        for old, digest in then.items():
            name = moved.get(old, old)
            same = self._as_in(name, old, back) == digest
            found[name] = self.of_module(name.partition(":")[0])[name].digest if same else digest
        return found

    @cached_property
    def _places(self) -> dict[str, list[str]]:
        """The units of each path."""
        found: dict[str, list[str]] = defaultdict(list)
        for module in self.files:
            for name in self.of_module(module):
                found[name.partition(":")[2]].append(name)
        return found

    def _as_in(self, name: str, old: str, back: Mapping[str, str]) -> str:
        """Return the digest that a unit would have if what moved, and it, were back in its place.

        Args:
            old: its name then.
            back: the names then of what moved.
        """
        unit = self.get(name)
        home, module = (one.partition(":")[0] for one in (name, old))
        return "" if unit is None else _of_parts(unit.parts, home, module, back)

    def at(self, file: str, line: int) -> str:
        """Return the innermost unit that has a line of a file, empty for none."""
        name = _module(Path(file.removeprefix("scripts/")))
        if name not in self.files:
            return ""
        around = [
            (unit.lines[1] - unit.lines[0], one)
            for one, unit in self.of_module(name).items()
            if unit.lines[0] <= line <= unit.lines[1]
        ]
        return min(around)[1] if around else ""

    def executed(self, functions: Iterable[tuple[str, int]]) -> set[str]:
        """Return the units that were executed, by file and first line of what was called.

        With the constants and classes that these name, directly or not, and what their modules do
        when they are imported.
        """
        found: set[str] = set()
        waiting = [name for file, line in functions if (name := self.at(file, line))]
        waiting += [f"{module}:{BODY}" for module in {name.partition(":")[0] for name in waiting}]
        while waiting:
            name = waiting.pop()
            unit = self.get(name) if name not in found else None
            if unit is not None:
                found.add(name)
                waiting += [one for one in unit.names if self._is_named(one)]
                owner = name.rpartition(".")[0]
                waiting += [owner] if ":" in owner else []
        return found

    def called(self, name: str, within: Iterable[str]) -> set[str]:
        """Return a function and what it may call in some modules, by the names in it."""
        every = {one: unit for module in within for one, unit in self.of_module(module).items()}
        last: dict[str, list[str]] = {}
        for one in every:
            last.setdefault(one.rpartition(":")[2].rpartition(".")[2], []).append(one)
        found: set[str] = set()
        waiting = [name]
        while waiting:
            one = waiting.pop()
            if one not in found and one in every:
                found.add(one)
                waiting += every[one].names
                waiting += [each for part in every[one].names for each in last.get(part, ())]
        return found

    def _is_named(self, name: str) -> bool:
        unit = self.get(name)
        return unit is not None and not unit.is_function


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def of_text(module: str, text: str) -> Units:
    """Return the units of a module with a text, by their names."""
    tree = ast.parse(text)
    imported = dict(_imported(tree))
    own = {name for node in tree.body for name in _defined(node)}
    found: Units = {}

    def add(path: str, node: Any, is_function: bool) -> None:
        names = frozenset(_named(node, module, imported, own))
        name = f"{module}:{path}"
        parts: tuple[Part, ...] = (_part(node, module, imported, own),)
        lines = (_first(node), node.end_lineno)
        if name in found:  # a property and its setter, or one of two branches
            parts = found[name].parts + parts
            lines = found[name].lines[0], lines[1]
            names |= found[name].names
        found[name] = Unit(_of_parts(parts, module, module), lines, names, is_function, parts)

    def walk(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, _FUNCTIONS):
                add(f"{prefix}{node.name}", node, True)
            elif isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
                # What it defines is known by name: a method that comes may override another's.
                node.body = [
                    ast.Expr(ast.Name(one.name))
                    if isinstance(one, (*_FUNCTIONS, ast.ClassDef))
                    else one
                    for one in node.body
                ]
                add(f"{prefix}{node.name}", node, False)
            elif isinstance(node, ast.If | ast.Try | ast.With) and not prefix:
                branches = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
                branches += [one.body for one in getattr(node, "handlers", [])]
                for branch in branches:
                    walk(branch, prefix)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
                _constant(node, add)
            elif not (prefix or isinstance(node, _DEFINES) or _stands_alone(node)):
                add(BODY, node, False)

    walk(tree.body, "")
    return found


def _constant(node: ast.Assign | ast.AnnAssign, add: object) -> None:
    """Add a constant; of a table of rules, one for each rule."""
    assert callable(add)
    if node.value is None or any(_called(one) in _TABLES for one in ast.walk(node.value)):
        return
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        name = ast.unparse(target)
        parts = node.value.elts if isinstance(node.value, ast.Tuple) else []
        if any(_called(one) == "Rule" for one in parts):
            for part in parts:
                first = part.args[0] if isinstance(part, ast.Call) and part.args else part
                add(f"{name}[{ast.unparse(first)}]", part, False)
        else:
            add(name, node, False)


def _called(node: ast.AST) -> str:
    """Return the last part of the name of what a call calls, empty for other nodes."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _first(node: Any) -> int:
    """Return the first line of a definition, as its code object has it: of the first decorator."""
    return int(min(one.lineno for one in (node, *getattr(node, "decorator_list", ()))))


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a module imports, and what each is: ``module`` or ``module:name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}:{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (ast.unparse(one) for one in targets)


def _named(node: ast.AST, module: str, imported: dict[str, str], own: set[str]) -> Iterator[str]:
    """Yield what a node names of its module and of those that it imports, and every attribute."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and one.id in own:
            yield f"{module}:{one.id}"
        elif isinstance(one, ast.Name) and one.id in imported:
            yield imported[one.id]
        elif isinstance(one, ast.Attribute):
            yield one.attr
            if isinstance(one.value, ast.Name) and one.value.id in imported:
                yield f"{imported[one.value.id].replace(':', '.')}:{one.attr}"


def _part(node: ast.AST, module: str, imported: Mapping[str, str], own: set[str]) -> Part:
    bare = _Bare().visit(ast.parse(ast.unparse(node)))
    named = {one.id for one in ast.walk(bare) if isinstance(one, ast.Name)}
    mine = frozenset(named & own - imported.keys())
    used = {
        name: imported.get(name, f"{module}:{name}") for name in sorted(named & {*own, *imported})
    }
    return Part(ast.dump(bare), used, mine)


def _of_parts(
    parts: Iterable[Part], home: str, module: str, back: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the digest that a unit would have in a module, with what is imported there.

    Args:
        home: the module that it is in.
        module: that module.
        back: where what its names stand for would be.
    """
    digest = ""
    for part in parts:
        text = part.text
        for name, now in part.used.items():
            there = back.get(now, now)
            # A package may import a module of its own, which is imported all the same.
            has_moved = name in part.own or there != now or module != home
            if not (has_moved and there == f"{module}:{name}"):
                text += f"\n{name}={there}"
        made = _short(text)
        digest = _short(digest + made) if digest else made
    return digest


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class _Bare(ast.NodeTransformer):
    """Takes docstrings, annotations and texts for people out of a tree."""

    def visit(self, node: ast.AST) -> ast.AST:
        """Return a node without its words."""
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [one for one in body if not _stands_alone(one)] or [ast.Pass()]
        if isinstance(node, (*_FUNCTIONS,)):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.Call) and (first := _told(node)) is not None:
            node.args[first:] = [_wordless(one) for one in node.args[first:]]
            for keyword in node.keywords:
                keyword.value = _wordless(keyword.value)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args = [_wordless(one) for one in node.exc.args]
        return super().generic_visit(node)


def _stands_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _told(node: ast.Call) -> int | None:
    """Return the first argument of a call that is a text for people; None if none is."""
    owner = getattr(node.func, "value", None)
    return 0 if getattr(owner, "id", "") in _LOGGERS else _TOLD.get(_called(node))


def _wordless(node: ast.expr) -> ast.expr:
    """Return an expression without the words in it, where it is a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return ast.Constant("")
    if isinstance(node, ast.JoinedStr):
        node.values = [one for one in node.values if not isinstance(one, ast.Constant)]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        node.left, node.right = _wordless(node.left), _wordless(node.right)
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = _wordless(node.body), _wordless(node.orelse)
    return node


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


@cache
def of_rows() -> dict[str, str]:
    """Return the digests of the rows and features of today, by ``row:id`` and ``feature:name``."""
    found = {}
    for feature in patches.FEATURES:
        found[f"feature:{feature.name}"] = of_feature(feature)
        found |= {f"row:{patch.id}": of_row(patch) for patch in feature.patches}
    return found


def of_row(patch: Patch) -> str:
    """Return the digest of a row: what it changes, and where."""
    return _hash(
        *(patch.target, patch.wrapper, patch.kind.value, patch.parameters),
        *(patch.since, patch.before, patch.only_with),
    )


def of_feature(feature: Feature) -> str:
    """Return the digest of a feature: when its rows apply, and in what order."""
    return _hash(
        *(feature.since, feature.wanted, feature.requires, feature.prepare, feature.rules),
        *(feature.before_kvcached, feature.optional, tuple(one.id for one in feature.patches)),
    )


@cache
def of_files() -> dict[str, str]:
    """Return the digests of what kvcached is compiled against here, by ``file:path``."""
    found = {}
    for folder in _NATIVE:
        for path in sorted((ROOT / "kvpatch" / folder).rglob("*")):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                name = path.relative_to(ROOT)
                found[f"file:{name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return found
