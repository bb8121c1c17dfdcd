"""The functions below the registry's targets: those that rows name, and what these call.

Read from a release's sources, without importing them. A name is followed to its definition
anywhere in vLLM but in ``APART``. A method of an object whose class the source does not say is
every method of that name in ``SCOPE``, the packages between scheduler and KV cache: rather too
many than too few. Two releases with the same functions here run the same code below every row.
"""

import ast
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from harness.matrix.signatures import FUNCTIONS, Module, Sources

_KV = "vllm.distributed.kv_transfer"
_CONNECTORS = f"{_KV}.kv_connector"
SCOPE = (
    *("vllm.v1.core", "vllm.v1.engine.core", "vllm.v1.executor", "vllm.v1.worker"),
    *("vllm.v1.request", "vllm.v1.outputs", "vllm.v1.kv_cache_interface"),
    *("vllm.v1.kv_offload", "vllm.v1.simple_kv_offload", "vllm.distributed.kv_events"),
    *(f"{_KV}.kv_transfer_state", f"{_CONNECTORS}.factory", f"{_CONNECTORS}.utils"),
    *(f"{_CONNECTORS}.v1.{name}" for name in ("base", "metrics", "offloading")),
    *(f"{_CONNECTORS}.v1.{name}_connector" for name in ("offloading", "multi")),
    f"{_CONNECTORS}.v1.simple_cpu_offload_connector",
    *("vllm.v1.attention.backends.cpu_attn", "vllm.v1.attention.backends.mla.cpu_mla"),
    *("vllm.platforms.interface", "vllm.platforms.cpu"),
)
# In these packages, for what no validated configuration has.
_REFUSED = (
    *("vllm.v1.executor.ray_", "vllm.v1.worker.gpu.spec_decode", "vllm.v1.worker.tpu"),
    *("vllm.v1.worker.xpu", "vllm.v1.kv_offload.worker.xpu", "vllm.v1.kv_offload.tiering.example"),
    *("vllm.v1.kv_offload.tiering.obj", "vllm.v1.kv_offload.tiering.p2p"),
)
# What an engine is made from. The round trips, which run on each release, show what was made.
APART = (
    *("vllm.config", "vllm.transformers_utils", "vllm.tokenizers", "vllm.compilation"),
    *("vllm.multimodal", "vllm.envs", "vllm.logger", "vllm.v1.structured_output"),
)
# Methods of containers, which say nothing about the class of an object.
_COMMON = frozenset(name for kind in (dict, list, set, str, tuple, bytes) for name in dir(kind))


@dataclass(frozen=True)
class Function:
    """One function, or the statements of a class or of a name.

    Attributes:
        digest: of its text, without docstrings and comments.
        steps: calls from the nearest target; 0 for a target.
    """

    digest: str
    steps: int
    lines: tuple[int, int] = (0, 0)


def below(sources: Sources, targets: list[str]) -> dict[str, Function]:
    """Return the functions below targets, by ``module:path``.

    A target that the sources do not have, which kvcached adds, has none.
    """
    return _Search(sources).run(targets)


def digest(functions: Mapping[str, Function]) -> str:
    """Return one digest of functions and their names."""
    text = "".join(f"{name} {functions[name].digest}\n" for name in sorted(functions))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed(old: Mapping[str, Function], new: Mapping[str, Function]) -> list[str]:
    """Return what differs, is gone or is new, nearest to a target first."""

    def text(of: Mapping[str, Function], name: str) -> str | None:
        return of[name].digest if name in of else None

    names = [name for name in old.keys() | new.keys() if text(old, name) != text(new, name)]
    return sorted(names, key=lambda name: ((new.get(name) or old[name]).steps, name))


@dataclass(frozen=True)
class _Node:
    """A definition, and the module it is in."""

    module: Module
    path: str
    node: ast.AST

    @property
    def name(self) -> str:
        return f"{self.module.name}:{self.path}"

    def function(self, steps: int) -> Function:
        first = getattr(self.node, "lineno", 1)
        last = getattr(self.node, "end_lineno", first)
        return Function(_digest(self.node), steps, (first, last))


class _Search:
    """The search in one release."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def run(self, targets: list[str]) -> dict[str, Function]:
        found: dict[str, Function] = {}
        waiting = [node for target in targets for node in self._target(target)]
        steps = 0
        while waiting:
            new = {node.name: node for node in waiting if node.name not in found}
            found |= {name: node.function(steps) for name, node in new.items()}
            waiting = [one for node in new.values() for one in self._named_by(node)]
            steps += 1
        return found

    def _target(self, target: str) -> Iterator[_Node]:
        name, _, path = target.partition(":")
        module = self.sources.module(name)
        if module is not None:
            yield from self._resolve(module, path.split("."))

    @cached_property
    def _methods(self) -> dict[str, list[_Node]]:
        """Every method in ``SCOPE``, by its name."""
        found: dict[str, list[_Node]] = {}
        for path in sorted(self.sources.folder.glob("vllm/**/*.py")):
            parts = path.relative_to(self.sources.folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            within = any(name == one or name.startswith(f"{one}.") for one in SCOPE)
            module = self.sources.module(name) if within and not name.startswith(_REFUSED) else None
            for node in module.tree.body if module is not None else ():
                if module is not None and isinstance(node, ast.ClassDef):
                    for one in _methods_of(module, node):
                        found.setdefault(one.path.rpartition(".")[2], []).append(one)
        return found

    def _resolve(self, module: Module, path: list[str]) -> Iterator[_Node]:
        """Yield the definition that a path names, and of a class what runs by itself."""
        found = module.find(path)
        if found is None or isinstance(found[1], ast.Import | ast.ImportFrom):
            return
        where, node = found
        if where.name.startswith(APART):
            return
        if isinstance(node, ast.ClassDef):
            yield _Node(where, node.name, node)
            yield from (one for one in _methods_of(where, node) if one.path.endswith("__"))
        else:
            classes = (one for one in where.tree.body if isinstance(one, ast.ClassDef))
            owner = next((f"{one.name}." for one in classes if node in one.body), "")
            yield _Node(where, f"{owner}{path[-1]}", node)

    def _named_by(self, node: _Node) -> Iterator[_Node]:
        """Yield what the text of a definition names; a class's is without its methods."""
        for path in set(_names(node.node)):
            if path[0] in node.module.names:
                yield from self._resolve(node.module, list(path))
            if len(path) > 1 and path[-1] not in _COMMON:
                yield from self._methods.get(path[-1], ())


def _methods_of(module: Module, node: ast.ClassDef) -> Iterator[_Node]:
    for one in node.body:
        if isinstance(one, FUNCTIONS):
            yield _Node(module, f"{node.name}.{one.name}", one)


def _text(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a definition that are its text."""
    if not isinstance(node, ast.ClassDef):
        return [node]
    own = [one for one in node.body if not isinstance(one, FUNCTIONS)]
    return [*node.bases, *node.keywords, *node.decorator_list, *own]


def _names(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield the dotted names in a definition; what is not a name before a dot is empty."""
    for part in _text(node):
        for one in ast.walk(part):
            if isinstance(one, ast.Name | ast.Attribute):
                yield _dotted(one)


def _dotted(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Attribute):
        return (*_dotted(node.value), node.attr)
    return (node.id if isinstance(node, ast.Name) else "",)


def _digest(node: ast.AST) -> str:
    parts = _text(node)
    for one in (each for part in parts for each in ast.walk(part)):
        body = getattr(one, "body", None)
        if isinstance(body, list):  # of statements; texts that stand alone do nothing
            body[:] = [each for each in body if not _stands_alone(each)] or [ast.Pass()]
    dumped = "\n".join(ast.dump(part) for part in parts if not _stands_alone(part))
    return hashlib.sha256(dumped.encode()).hexdigest()[:12]


def _stands_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
