"""What scripts/mutate changes: always the same, valid, and never words for people."""

import pytest

from harness.mutation import verdicts
from harness.mutation.modules import MODULES, nearest
from harness.mutation.mutants import mutants
from harness.mutation.runner import ROOT


def changed(source):
    """Every other source, without the lines that are the same."""
    return [made.apply(source.encode()).decode().strip() for made in mutants(source)]


@pytest.mark.parametrize(
    ("source", "others"),
    [
        ("a = b < c", ["a = b <= c"]),
        ("a = (b) is not (c)", ["a = (b) is (c)"]),
        ("a = b and c", ["a = ((c))", "a = ((b))"]),
        ("a = not b", ["a = (b)"]),
        ("a = True", ["a = False"]),
        ("a = [b, *c]", ["a = [*c]", "a = [b]"]),
        ("a = b, c", ["a = (c,)", "a = (b,)"]),
        ("a = {'w': b, **c}", ["a = {**c}", "a = {'w': b}"]),
        ("a = any(b for b in c)", ["a = all(b for b in c)", "a = any(b for b in list(c)[:1])"]),
        ("a = b if c else d", ["a = (b)", "a = (d)"]),
        ("for a in b:\n    c(a)", ["for a in list(b)[:1]:\n    c(a)", "for a in b:\n    pass"]),
        ("def f():\n    return g()", ["def f():\n    g(); return None"]),
        ("a.b = c", ["pass"]),
        ("a = b[:c]", ["a = b"]),
    ],
)
def test_the_changes_of_a_line(source, others):
    assert changed(source) == others


@pytest.mark.parametrize(
    "source",
    [
        '"""Words."""',
        "log.warning(f'{a} of {b + 1}', 3)",
        "import a",
        "a: dict[int, str]",
        "def f(a: tuple[int, str]) -> list[int]: ...",
        "a = Refusal('what', 'why', 'remedy', code='KVP' + '101')",
        "FEATURE = Feature(name='f', optional=True)",
    ],
)
def test_what_is_not_changed(source):
    assert changed(source) == []


def test_a_change_has_the_same_name_as_long_as_its_code_is_the_same():
    before = "def f(a):\n    return [b + 1 for b in a if b + 1]\n"
    names = [mutant.id for mutant in mutants(before)]
    assert len(set(names)) == len(names)
    after = f"import x\n\n\n{before}\n\ndef g():\n    ...\n"
    assert [mutant.id for mutant in mutants(after)] == names
    assert "f: 1 -> (1 + 1) #2" in names


def test_every_module_of_the_core_exists():
    assert [path for path in MODULES if not (ROOT / path).is_file()] == []


def test_tests_are_near_that_import_a_module_themselves_or_by_a_helper():
    near = nearest(ROOT, "kvpatch/patches/simple_offload/eviction.py")
    assert "tests/unit/test_simple_eviction.py" in near
    assert "tests/unit/test_simple_order.py" in near
    assert "tests/unit/test_gate.py" not in near


def test_a_verdict_has_a_reason():
    for table in (verdicts.EQUIVALENT, verdicts.ELSEWHERE):
        assert set(table) <= set(MODULES)
        assert all(why for each in table.values() for why in each.values())
