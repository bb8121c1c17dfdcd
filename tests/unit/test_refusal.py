"""A refusal: one sentence in every process it travels to, its code, and what it is based on."""

import ast
import pickle
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from kvpatch import patches, rules
from kvpatch.refusal import CODES, UNCODED, Basis, Halted, Refusal, RefusedCall, RefusedImport

ROOT = Path(__file__).parents[2]
SENTENCE = "kvpatch refuses to start vLLM: a is b, because c is d; do e. [KVP404]"
RULES = rules.of(feature.rules for feature in patches.FEATURES)
# Of how something came to be known, which is nothing to an operator.
PRIVATE = re.compile(
    r"\b(compared with plain|prov(e|ed|en)|tried|told(?! apart| from)|heard|knows?|nobody)\b"
)


@pytest.mark.parametrize(
    ("kind", "opening"),
    [
        (Refusal, "kvpatch refuses to start vLLM"),
        (RefusedImport, "kvpatch refuses to start vLLM"),
        (RefusedCall, "kvpatch refuses the call"),
        (Halted, "kvpatch ends the engine"),
    ],
)
def test_it_is_one_sentence_and_survives_pickling(kind, opening):
    refusal = pickle.loads(pickle.dumps(kind("a is b", "c is d", "do e", code="KVP404")))
    assert type(refusal) is kind
    assert str(refusal) == f"{opening}: a is b, because c is d; do e. [KVP404]"
    assert (refusal.what, refusal.why, refusal.remedy) == ("a is b", "c is d", "do e")
    assert refusal.code == "KVP404"
    assert refusal.basis is Basis.INCOMPATIBLE


def test_a_quoted_error_of_many_lines_stays_one_line():
    assert str(Refusal("a", "it failed with X: one\n  two\n", "do e", code="KVP404")) == (
        "kvpatch refuses to start vLLM: a, because it failed with X: one two ; do e. [KVP404]"
    )


def test_kvcached_passes_it_on_and_imports_know_it():
    # kvcached logs and drops what is not a RuntimeError.
    assert issubclass(Refusal, RuntimeError)
    assert not issubclass(Refusal, ImportError)
    refused = RefusedImport.of(Refusal("a is b", "c is d", "do e", code="KVP404"))
    assert isinstance(refused, ImportError)
    assert isinstance(refused, Refusal)
    assert refused.name == "vllm"
    assert str(refused) == SENTENCE


MAKERS = ("Refusal", "RefusedImport", "RefusedCall", "Halted", "Rule")
# They pass on the code of a rule.
FORWARDED = {"Refusal(what, why, f'{self.remedy}, or set KVPATCH=0', code=self.code)"}


@cache
def calls():
    """Every place that makes a refusal: where, and the call."""
    found = []
    for path in sorted((ROOT / "kvpatch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS:
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", node))
    return found


def made():
    """What makes each refusal, where, and the code it gives, or None."""
    for place, node in calls():
        if ast.unparse(node) not in FORWARDED:
            given = [word.value for word in node.keywords if word.arg == "code"]
            if node.func.id == "Rule":
                given += node.args[:1]
            literal = given and isinstance(given[0], ast.Constant)
            yield node.func.id, place, given[0].value if literal else None


def test_no_refusal_is_without_a_code():
    """The places listed here need ``code="KVPnnn"`` and a line in kvpatch/refusal.py."""
    assert [place for _, place, code in made() if code in (None, UNCODED)] == []


def test_every_code_is_in_the_table_and_every_line_of_it_is_used():
    startup = (ROOT / "kvpatch/startup/kvpatch_startup.py").read_text()
    used = {code for *_, code in made()} | set(re.findall(r"\[(KVP\d+)\]", startup))
    assert used - {None} == set(CODES)


def test_a_code_has_one_form_and_one_meaning():
    assert all(re.fullmatch(r"KVP[1-6]\d\d", code) for code in CODES)
    assert list(CODES) == sorted(CODES)
    assert len({code.meaning for code in CODES.values()}) == len(CODES)
    assert UNCODED not in CODES


def test_a_code_has_one_rule_at_most_and_no_other_place_gives_a_rules_code():
    of_rules = Counter(code for maker, _, code in made() if maker == "Rule")
    assert set(of_rules.values()) == {1}
    assert sorted(of_rules) == sorted(rule.code for rule in RULES)
    assert not set(of_rules) & {code for maker, _, code in made() if maker != "Rule"}


def test_the_docs_list_every_code():
    text = (ROOT / "docs/errors.md").read_text()
    assert re.findall(r"^\| `(KVP\d+)`", text, re.MULTILINE) == list(CODES)


def test_what_is_incompatible_has_a_reference_and_nothing_else_has():
    for code, fault in CODES.items():
        assert bool(fault.reference) is (fault.basis is Basis.INCOMPATIBLE), code


def test_a_reference_to_a_test_names_one_that_is_there():
    for code, fault in CODES.items():
        for name, folder in re.findall(
            r"`(test_\w+(?:\.py)?)` in (tests/[\w/.]+)", fault.reference
        ):
            path = ROOT / folder / name if name.endswith(".py") else ROOT / folder
            assert path.is_file(), f"{code}: {path}"
            if not name.endswith(".py"):
                assert f"def {name}(" in path.read_text(), f"{code}: {name}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_says_what_it_is_based_on(rule):
    """What is not validated is told apart by the sentence alone."""
    not_validated = rule.fault.basis is Basis.NOT_VALIDATED
    assert bool(re.search(r"\bvalidated\b", rule.why)) is not_validated
    assert rule.kind and rule.why and rule.remedy


def sentences():
    """Every text of a rule and a code, and those that are written out where a refusal is made."""
    for rule in RULES:
        yield from ((rule.code, text) for text in (rule.kind, rule.why, rule.remedy))
    for place, node in calls():
        for word in ast.walk(node):
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                yield place, word.value
    yield from ((code, fault.meaning) for code, fault in CODES.items())


def test_no_refusal_has_private_words():
    assert [found for found in sentences() if PRIVATE.search(found[1])] == []


def test_what_is_not_validated_says_so():
    """Where the sentence is written out; those of rules are held above, of gates in test_gate."""
    for place, node in calls():
        if place.startswith("kvpatch/patches/") and node.func.id == "Refusal":
            (code,) = [word.value for word in node.keywords if word.arg == "code"]
            fault = CODES[ast.literal_eval(code)]
            said = "validated" in ast.unparse(node.args[1])
            assert said is (fault.basis is Basis.NOT_VALIDATED), place
