"""The signature of a target in a release's sources, read without importing or running them.

The answer for ``module:attribute.path`` is one string: a function's parameters in
brackets as its source has them, ``property``, ``class`` or ``value`` for what has no
signature that start-up could read, or None when it is not there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PROPERTIES = ("property", "cached_property", "functools.cached_property")


class Module:
    """One parsed source file."""

    def __init__(self, sources: Sources, name: str, path: Path) -> None:
        self.sources = sources
        self.name = name
        self.is_package = path.name == "__init__.py"
        self.tree = ast.parse(path.read_bytes())

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """What the module's own statements bind, the last binding of each name."""
        return dict(bindings(self.tree.body))

    def find(self, path: list[str]) -> tuple[Module, ast.AST] | None:
        """Return the definition that ``path`` names, and the module it is in."""
        node = self.names.get(path[0])
        if node is None:
            submodule = self.sources.module(f"{self.name}.{path[0]}") if self.is_package else None
            return submodule.find(path[1:]) if submodule and path[1:] else None
        if isinstance(node, ast.ImportFrom | ast.Import):
            return self._imported(node, path)
        if not path[1:]:
            return self, node
        return self._attribute(node, path[1:]) if isinstance(node, ast.ClassDef) else None

    def _attribute(self, node: ast.ClassDef, path: list[str]) -> tuple[Module, ast.AST] | None:
        own = dict(bindings(node.body)).get(path[0])
        if own is not None:
            return (self, own) if len(path) == 1 else None
        for base in node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            found = self.find(ast.unparse(base).split("."))
            if found is not None and isinstance(found[1], ast.ClassDef):
                inherited = found[0]._attribute(found[1], path)
                if inherited is not None:
                    return inherited
        return None

    def _imported(
        self, node: ast.ImportFrom | ast.Import, path: list[str]
    ) -> tuple[Module, ast.AST] | None:
        alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == path[0])
        if isinstance(node, ast.Import):
            full = alias.name if alias.asname else alias.name.split(".")[0]
            rest = path[1:]
        else:
            package = self.name.split(".")
            if node.level:
                package = package[: len(package) - node.level + self.is_package]
            base = ".".join([*(package if node.level else []), *([node.module or ""])]).strip(".")
            module = self.sources.module(base)
            if module is not None and alias.name in module.names:
                return module.find([alias.name, *path[1:]])
            full, rest = f"{base}.{alias.name}", path[1:]
        module = self.sources.module(full)
        if module is None or not rest:
            # Of another package, or a module itself: it is bound, without a signature.
            return None if rest else (self, node)
        return module.find(rest)


def bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that statements bind, also those under ``if``, ``try`` and ``with``."""
    for node in body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        yield name.id, node
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                yield from bindings(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from bindings(handler.body)


class Sources:
    """The modules of one unpacked release."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """Return a module of the release, parsed once; None when it has none of that name."""
        if name not in self._modules:
            path = self.folder.joinpath(*name.split("."))
            files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
            file = next((file for file in files if file.is_file()), None)
            self._modules[name] = Module(self, name, file) if file else None
        return self._modules[name]

    def signature(self, target: str) -> str | None:
        """Return what the release has at ``module:attribute.path``."""
        name, _, path = target.partition(":")
        module = self.module(name)
        found = module.find(path.split(".")) if module is not None else None
        return describe(found[1]) if found is not None else None

    def added(self, target: str) -> str | None:
        """Return what this package adds to a class of another one, or in a class it adds.

        kvcached does both to vLLM, in functions: ``EngineCore.name = function``, and
        ``class ElasticBlockPool`` set on vLLM's module.
        """
        owner, _, name = target.partition(":")[2].rpartition(".")
        for path in sorted(self.folder.rglob("*.py")) if owner else ():
            text = path.read_text()
            if f"{owner}.{name} = " not in text and f"class {owner}(" not in text:
                continue
            nodes = list(ast.walk(ast.parse(text)))
            for node in nodes:
                if isinstance(node, ast.ClassDef) and node.name == owner:
                    own = dict(bindings(node.body)).get(name)
                    if own is not None:
                        return describe(own)
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == (
                    f"{owner}.{name}"
                ):
                    return described_before(node, nodes)
        return None


def described_before(assignment: ast.Assign, nodes: list[ast.AST]) -> str:
    """Return the function that a name stands for where it is assigned."""
    before = [
        one
        for one in nodes
        if isinstance(one, FUNCTIONS)
        and one.name == ast.unparse(assignment.value)
        and one.lineno < assignment.lineno
    ]
    return describe(max(before, key=lambda one: one.lineno)) if before else "value"


def describe(node: ast.AST) -> str:
    """Return one definition as one string."""
    if isinstance(node, FUNCTIONS):
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        if decorators & set(PROPERTIES) or any(one.endswith(".setter") for one in decorators):
            return "property"
        return f"({ast.unparse(node.args)})"
    return "class" if isinstance(node, ast.ClassDef) else "value"
