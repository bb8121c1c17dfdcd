"""Patches and gates, for what stays half applied or off in silence."""

import sys
import types

import pytest
from fakes import raising
from packaging.version import Version
from test_gate import allowing, found
from test_patch import patch, world  # noqa: F401

from kvpatch import gate
from kvpatch.patch import Feature, Gap, Kind, Outcome, Patch, Seam, Transaction
from kvpatch.versions import Span


def instead(original):
    return lambda *args: f"instead of {original.__name__}"


def interrupted(original):
    raise KeyboardInterrupt


def ours(name, target, kind):
    return patch(target, kind=kind)._replace(wrapper=f"{__name__}:{name}")


def test_an_interrupt_leaves_no_part_of_a_feature(world):  # noqa: F811
    transaction = Transaction()
    with pytest.raises(KeyboardInterrupt):
        transaction.apply_all(
            (patch("Thing.method"), ours("interrupted", "function", Kind.REPLACE))
        )
    assert transaction.applied == []
    assert world.Thing().method() == "method"


def test_a_guard_is_around_every_wrapper_and_no_replacement(world):  # noqa: F811
    def guard(wrapper):
        return lambda *args: f"guarded {wrapper(*args)}"

    transaction = Transaction(guard)
    transaction.apply_all((patch("function"), ours("instead", "Thing.method", Kind.REPLACE)))
    assert world.function() == "guarded loud function"
    assert world.Thing().method() == "instead of method"
    assert [applied.patch.id for applied in transaction.applied] == ["function", "Thing.method"]


def test_reverting_goes_down_to_a_count_newest_first(world):  # noqa: F811
    transaction = Transaction()
    transaction.apply_all((patch("function"), patch("Thing.method"), patch("Thing.static")))
    assert transaction.revert_to(1) == []
    assert [applied.patch.id for applied in transaction.applied] == ["function"]
    assert world.function() == "loud function"
    assert world.Thing.static() == "static"


def test_the_fields_of_a_row_a_seam_and_a_feature():
    row = patch("function")._replace(since="0.20", before="0.24")
    later = patch("Thing.method")._replace(since="0.24")
    gap = Gap("0.16", "0.20", "not there")
    assert (row.span, gap.span) == (Span("0.20", "0.24"), Span("0.16", "0.20"))
    one = Seam((gap, row, later))
    assert one == Seam((gap, row, later))
    assert (one.name, one.patches) == ("function", (row, later))
    assert one.at(Version("0.17")) == [gap]
    feature = Feature("f", "s", (one, patch("Thing.static")), since="0.16")
    assert feature.span == Span("0.16")
    assert [each.id for each in feature.patches] == ["function", "Thing.method", "Thing.static"]
    assert [each.id for each in feature.at(Version("0.17"))] == ["Thing.static"]
    assert [each.id for each in feature.at(Version("0.24"))] == ["Thing.method", "Thing.static"]
    assert (feature.before_kvcached, feature.optional) == (False, False)


@pytest.mark.parametrize(
    "outcome", [Outcome.ABSENT, Outcome.MOVED, Outcome.FAILED, Outcome.OUTSIDE]
)
def test_an_optional_feature_that_does_not_fit_a_validated_release_stops_vllm(outcome):
    """Only where it is not validated does a rule refuse what needs it."""
    feature = Feature("f", "s", (), since="0.16", optional=True)
    refused = gate.refusal(feature, gate.Verdict(outcome, "because"))
    if outcome is Outcome.OUTSIDE:
        assert refused is None
    else:
        assert refused.code == "KVP201"
    required = gate.refusal(feature._replace(optional=False), gate.Verdict(outcome, "because"))
    assert required.code == "KVP201"


@pytest.mark.parametrize("outcome", [Outcome.APPLIED, Outcome.NOT_NEEDED])
def test_what_applies_or_is_not_needed_is_no_refusal(outcome):
    assert gate.refusal(Feature("f", "s", (), since="0.16"), gate.Verdict(outcome)) is None
    assert gate.Verdict(outcome).passed is (outcome is Outcome.APPLIED)


def test_a_feature_of_later_releases_is_off_on_one_that_is_named():
    feature = Feature("f", "s", (), since="0.28")
    assert not gate.applies(feature, found("0.27.9"), allowing("0.27.9"))
    assert gate.applies(feature, found("0.28.7"), allowing("0.28.7"))
    assert not gate.applies(feature, found("0.28.7"), allowing("0.28.8"))


@pytest.fixture
def module(monkeypatch):
    class Target:
        @staticmethod
        def static(first): ...

        @classmethod
        def of_class(cls, second): ...

        def method(self, third): ...

    made = types.ModuleType("edges_module")
    made.Target, made.needed = Target, True
    made.wanted = lambda: made.needed
    monkeypatch.setitem(sys.modules, "edges_module", made)
    return made


@pytest.mark.parametrize(
    ("path", "names"),
    [("static", ["first"]), ("of_class", ["cls", "second"]), ("method", ["self", "third"])],
)
def test_a_signature_is_the_functions_own(module, path, names):
    assert list(gate.imported(f"edges_module:Target.{path}")()) == names


def row(path, *parameters):
    return Patch(path, f"edges_module:{path}", "w", "u", "t", "w:w", parameters, "0.16")


def test_every_target_of_a_feature_is_looked_at(module):
    fits = row("Target.method", "third")
    for broken in (row("Target.gone"), row("Target.static", "other")):
        feature = Feature("f", "s", (fits, broken), since="0.16")
        assert gate.check_feature(feature, found("0.28.0"), environment={}).passed is False
    assert gate.check_feature(Feature("f", "s", (fits,), since="0.16"), found("0.28.0")).passed


def test_a_needed_feature_is_checked(module):
    feature = Feature("f", "s", (row("Target.gone"),), since="0.16", wanted="edges_module:wanted")
    assert gate.check_feature(feature, found("0.28.0")).outcome is Outcome.ABSENT
    module.needed = False
    assert gate.check_feature(feature, found("0.28.0")).outcome is Outcome.NOT_NEEDED


def test_an_error_of_the_module_itself_is_no_crash(monkeypatch):
    verdict = gate.check_target(row("Target.method"), raising(OSError("libcuda.so is missing")))
    assert verdict.outcome is Outcome.ABSENT
    assert "OSError: libcuda.so is missing" in verdict.reason


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_a_function_without_a_readable_signature_has_moved(error):
    def parameters():
        raise error("no signature found for builtin")

    verdict = gate.check_target(row("Target.method", "self"), lambda target: parameters)
    assert verdict.outcome is Outcome.MOVED
    assert "no signature to read" in verdict.reason
