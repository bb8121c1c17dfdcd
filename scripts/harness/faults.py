"""The marked section of docs/faults.md: every test with ``@pytest.mark.fault(what, then)``.

Those of a file are a section, under the first line of the file. Faults that tests of other lanes
show without the mark are written in the page itself; tests/unit/test_docs_pages.py asks whether
each test there exists.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT, markdown

TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Fault:
    """A row: what is broken, what happens then, the test, and its lane."""

    what: str
    then: str
    test: str
    lane: str


def _marked(module: ast.Module) -> Iterator[tuple[str, str, str]]:
    for function in (one for one in module.body if isinstance(one, ast.FunctionDef)):
        for decorator in function.decorator_list:
            for node in ast.walk(decorator):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                    what, then = map(ast.literal_eval, node.args)
                    yield what, then, function.name


def sections(tests: Path = TESTS) -> dict[str, list[Fault]]:
    """Return the faults by section."""
    found: dict[str, list[Fault]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        module, lane = ast.parse(path.read_text()), path.relative_to(tests).parts[0]
        title = (ast.get_docstring(module) or "").partition("\n")[0].rstrip(".")
        if rows := [Fault(*one, lane) for one in _marked(module)]:
            found.setdefault(title, []).extend(rows)
    return found


def section() -> str:
    """Return the section."""
    return markdown.render("faults.md", sections=sections())
