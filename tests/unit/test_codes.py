"""Every refusal has a code of its own, and every code a refusal."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kvpatch.codes import CODES, UNCODED

ROOT = Path(__file__).parents[2]
REFUSALS = ("Refusal", "RefusedImport", "Rule")
FORWARDED = {"Refusal(self.what(config), self.why, self.remedy, self.code)"}


def raised() -> Iterator[tuple[str, str | None]]:
    """Every place that makes a refusal, with the code it gives, or None."""
    for path in sorted((ROOT / "kvpatch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node) in FORWARDED:
                continue
            if not isinstance(node.func, ast.Name) or node.func.id not in REFUSALS:
                continue
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            codes = [word.value for word in node.keywords if word.arg == "code"]
            literal = codes and isinstance(codes[0], ast.Constant)
            yield place, codes[0].value if literal else None


def test_no_refusal_is_without_a_code():
    """The places listed here need ``code="KVPnnn"`` and a line in kvpatch/codes.py."""
    assert [place for place, code in raised() if code in (None, UNCODED)] == []


def test_every_code_is_in_the_table_and_every_line_of_it_is_used():
    startup = (ROOT / "kvpatch/startup/kvpatch_startup.py").read_text()
    used = {code for _, code in raised()} | set(re.findall(r"\[(KVP\d+)\]", startup))
    assert used - {None} == set(CODES)


def test_a_code_has_one_form_and_one_meaning():
    assert all(re.fullmatch(r"KVP[1-5]\d\d", code) for code in CODES)
    assert list(CODES) == sorted(CODES)
    assert len(set(CODES.values())) == len(CODES)
    assert UNCODED not in CODES


def test_the_docs_list_every_code():
    text = (ROOT / "docs/errors.md").read_text()
    assert re.findall(r"^\| `(KVP\d+)`", text, re.MULTILINE) == list(CODES)
