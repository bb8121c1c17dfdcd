"""The mutants of a module: one small change of its source each, always the same ones.

mutmut and cosmic-ray change operators and constants. The faults that matter here are others:
one element of a list left out, only the first page or rank handled, a call forgotten. So the
changes are made here, from the syntax tree, as edits of the source text.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

OPERATORS: dict[type[ast.AST], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
CALLS = {"any": "all", "all": "any", "min": "max", "max": "min"}
TEXTS = {"Refusal", "Rule"}  # their words are for people
LOGS = {"debug", "info", "warning", "error", "exception"}
ROWS = {"Feature"}  # the table, which scripts/matrix checks in every release


@dataclass(frozen=True)
class Mutant:
    """One change of a module's source.

    Attributes:
        id: ``function: old -> new``, with ``#n`` if that is not the first of its kind; the
            same as long as the changed code is.
        line: the line that it begins in.
        start, end: the bytes that ``new`` replaces.
        new: the other source text.
    """

    id: str
    line: int
    start: int
    end: int
    new: str

    def apply(self, source: bytes) -> bytes:
        """Return the changed source."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants(source: str) -> list[Mutant]:
    """Return every mutant of a module that is valid Python and differs from it, in its order."""
    return _Mutator(source).found()


class _Mutator:
    def __init__(self, source: str) -> None:
        self._source = source.encode()
        self._tree = ast.parse(source)
        lines = self._source.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def found(self) -> list[Mutant]:
        mutants: list[Mutant] = []
        seen: Counter[str] = Counter()
        for where, node in self._walk(self._tree, ()):
            for start, end, new in self._changes(node):
                changed = self._source[:start] + new.encode() + self._source[end:]
                try:
                    if ast.dump(ast.parse(changed)) == ast.dump(self._tree):
                        continue
                except SyntaxError:
                    continue
                old = " ".join(self._source[start:end].decode().split())
                name = f"{'.'.join(where) or 'module'}: {_short(old)} -> {_short(new) or 'nothing'}"
                if not old:
                    continue
                seen[name] += 1
                label = name if seen[name] == 1 else f"{name} #{seen[name]}"
                line = self._source[:start].count(b"\n") + 1
                mutants.append(Mutant(label, line, start, end, new))
        return mutants

    def _walk(
        self, node: ast.AST, where: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], ast.AST]]:
        """Yield the nodes that may be changed, with the names of the functions around them."""
        if _is_text(node):
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            where = (*where, node.name)
        yield where, node
        for child in _code(node):
            yield from self._walk(child, where)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt, ast.comprehension, ast.keyword))
        assert not isinstance(node, ast.comprehension)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _replace(self, node: ast.AST, new: str) -> tuple[int, int, str]:
        return (*self._span(node), new)

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.Compare):
            for left, operator, right in zip(
                [node.left, *node.comparators], node.ops, node.comparators, strict=False
            ):
                new = OPERATORS.get(type(operator))
                if new:
                    yield self._between(left, right, new)
        elif isinstance(node, ast.BinOp):
            new = OPERATORS.get(type(node.op))
            if new and not isinstance(node.left, ast.JoinedStr):
                yield self._between(node.left, node.right, new)
        elif isinstance(node, ast.BoolOp):
            for left_out in node.values:
                rest = [f"({self._text(part)})" for part in node.values if part is not left_out]
                joined = (" and " if isinstance(node.op, ast.And) else " or ").join(rest)
                yield self._replace(node, f"({joined})")
        elif isinstance(node, ast.UnaryOp):
            if isinstance(node.op, (ast.Not, ast.USub)):
                yield self._replace(node, f"({self._text(node.operand)})")
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                yield self._replace(node, str(not node.value))
            elif isinstance(node.value, (int, float)):
                yield self._replace(node, f"({node.value} + 1)")
        elif isinstance(node, ast.IfExp):
            yield self._replace(node, f"({self._text(node.body)})")
            yield self._replace(node, f"({self._text(node.orelse)})")
        elif isinstance(node, (ast.If, ast.While)):
            if not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
                yield self._replace(node.test, f"(not ({self._text(node.test)}))")
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)) and isinstance(
            getattr(node, "ctx", ast.Load()), ast.Load
        ):
            yield from self._without_one(node, node.elts)
        elif isinstance(node, ast.Dict):
            for index in range(len(node.values)):
                others: list[str] = []
                for other, key in enumerate(node.keys):
                    if other != index:
                        text = self._text(node.values[other])
                        others.append(f"**{text}" if key is None else f"{self._text(key)}: {text}")
                yield self._replace(node, "{" + ", ".join(others) + "}")
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CALLS:
                yield self._replace(node.func, CALLS[node.func.id])
        elif isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Slice) and isinstance(node.ctx, ast.Load):
                yield self._replace(node, self._text(node.value))
        elif isinstance(node, ast.For):
            yield self._replace(node.iter, f"list({self._text(node.iter)})[:1]")
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            for loop in node.generators:
                yield self._replace(loop.iter, f"list({self._text(loop.iter)})[:1]")
                for condition in loop.ifs:
                    yield self._replace(condition, "True")
        elif isinstance(node, (ast.Continue, ast.Raise, ast.AugAssign, ast.Delete, ast.Expr)):
            value = getattr(node, "value", None)
            if isinstance(value, (ast.Yield, ast.Constant)):
                return
            yield self._replace(node, "pass")
        elif isinstance(node, ast.Assign):
            if any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
                yield self._replace(node, "pass")
        elif isinstance(node, ast.Return) and isinstance(node.value, (ast.Call, ast.Name)):
            # What a wrapper returns is vLLM's: what happens when it is lost.
            yield self._replace(node, f"{self._text(node.value)}; return None")

    def _without_one(
        self, node: ast.Tuple | ast.List | ast.Set, elements: Iterable[ast.expr]
    ) -> Iterator[tuple[int, int, str]]:
        elements = list(elements)
        if isinstance(node, ast.Set) and len(elements) == 1:
            return
        opened, closed = {ast.Tuple: ("(", ")"), ast.List: ("[", "]"), ast.Set: ("{", "}")}[
            type(node)
        ]
        for left_out in elements:
            rest = [self._text(one) for one in elements if one is not left_out]
            comma = "," if isinstance(node, ast.Tuple) and len(rest) == 1 else ""
            yield self._replace(node, f"{opened}{', '.join(rest)}{comma}{closed}")

    def _between(self, left: ast.expr, right: ast.expr, new: str) -> tuple[int, int, str]:
        """Replace the operator between two operands, which may be in brackets."""
        start, end = self._span(left)[1], self._span(right)[0]
        text = self._source[start:end].decode()
        after = len(text) - len(text.lstrip(" \n)"))
        before = len(text.rstrip(" \n("))
        return start + after, start + before, new


def _code(node: ast.AST) -> list[ast.AST]:
    """Return the children of a node, without annotations, decorators and bases."""
    if isinstance(node, ast.FunctionDef):
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        return [*defaults, *node.body]
    if isinstance(node, ast.ClassDef):
        return [*node.body]
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value is not None else []
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
        return [node.value, *([] if isinstance(node.slice, ast.Tuple) else [node.slice])]
    if isinstance(node, ast.Raise):  # its text is for people
        return []
    if isinstance(node, ast.Call) and _name(node) in TEXTS:
        # Only what decides: the condition.
        lambdas: list[ast.AST] = [part for part in node.args if isinstance(part, ast.Lambda)]
        return lambdas[:1]
    if isinstance(node, ast.Lambda):
        return [node.body]
    if isinstance(node, ast.keyword) and node.arg == "strict":  # a check of zip's, of equal lists
        return []
    return list(ast.iter_child_nodes(node))


def _name(call: ast.Call) -> str | None:
    return getattr(call.func, "id", getattr(call.func, "attr", None))


def _is_text(node: ast.AST) -> bool:
    """Return whether a node is text for people, or a row."""
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Call):
            return _name(node.value) in LOGS
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        return getattr(node.test, "id", None) == "TYPE_CHECKING"
    if isinstance(node, ast.Call):
        return _name(node) in ROWS
    return isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 90 else f"{text[:60]} ... {text[-25:]}"
