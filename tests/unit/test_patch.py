"""Applying and reverting: whole or not at all, and back to the exact object."""

import itertools
import sys
import types

import pytest
from packaging.version import Version

from kvpatch.patch import (
    Feature,
    Gap,
    Kind,
    Patch,
    Seam,
    Transaction,
    apply,
    argument,
    load,
    topmost,
)
from kvpatch.versions import Span


def loud(wrapped, instance, args, kwargs):
    return f"loud {wrapped(*args, **kwargs)}"


def quiet(wrapped, instance, args, kwargs):
    return f"quiet {wrapped(*args, **kwargs)}"


def another(original):
    return lambda *args: f"instead of {original.__name__}"


def interrupted(original):
    raise KeyboardInterrupt


@pytest.fixture
def world(monkeypatch):
    """A module to patch, made anew for every test."""

    class Base:
        def inherited(self):
            return "inherited"

    class Thing(Base):
        def method(self):
            return "method"

        @staticmethod
        def static():
            return "static"

        @classmethod
        def of_class(cls):
            return f"class of {cls.__name__}"

        @property
        def value(self):
            return "value"

    def function():
        return "function"

    def lazily(name):
        if name != "lazy":
            raise AttributeError(name)
        return lambda: "lazy"

    module = types.ModuleType("world")
    module.Base, module.Thing, module.function = Base, Thing, function
    module.__getattr__ = lazily
    monkeypatch.setitem(sys.modules, "world", module)
    return module


def patch(target, wrapper="loud", kind=Kind.WRAP):
    reference = f"{__name__}:{wrapper}"
    return Patch(target, f"world:{target}", "w", "u", "t", reference, (), "0", kind=kind)


CALLS = {
    "Thing.method": lambda world: world.Thing().method(),
    "Thing.inherited": lambda world: world.Thing().inherited(),
    "Thing.static": lambda world: world.Thing.static(),
    "Thing.of_class": lambda world: world.Thing.of_class(),
    "function": lambda world: world.function(),
    "lazy": lambda world: world.lazy(),
}


def parent_of(world, target):
    return world if "." not in target else world.Thing


@pytest.mark.parametrize("target", CALLS)
@pytest.mark.parametrize("wrapper", ["loud", "another"])
def test_patching_and_back_to_the_exact_object(world, target, wrapper):
    call, parent, name = CALLS[target], parent_of(world, target), target.rpartition(".")[2]
    before, plain = dict(vars(parent)), call(world)
    kind = Kind.WRAP if wrapper == "loud" else Kind.REPLACE
    applied = apply(patch(target, wrapper, kind))
    assert vars(parent)[name] is applied.replacement
    assert kind is Kind.REPLACE or call(world) == f"loud {plain}"
    assert applied.revert() is True
    assert call(world) == plain
    assert vars(parent).keys() == before.keys()
    assert vars(parent).get(name) is before.get(name)


def test_an_instance_reaches_the_wrapper(world, monkeypatch):
    seen = []
    monkeypatch.setattr(
        sys.modules[__name__],
        "loud",
        lambda wrapped, instance, args, kwargs: seen.append((instance, args, kwargs)),
    )
    apply(patch("Thing.method"))
    thing = world.Thing()
    thing.method()
    assert seen == [(thing, (), {})]


def test_a_base_class_is_not_touched_by_a_patch_of_a_subclass(world):
    apply(patch("Thing.inherited"))
    assert world.Base().inherited() == "inherited"


TARGETS = ("Thing.method", "Thing.static", "function")


@pytest.mark.parametrize("order", list(itertools.permutations(TARGETS)), ids=" ".join)
@pytest.mark.parametrize("back", list(itertools.permutations(TARGETS)), ids=" ".join)
def test_reverting_in_any_order(world, order, back):
    before = {target: vars(parent_of(world, target)).copy() for target in TARGETS}
    transaction = Transaction()
    transaction.apply_all(tuple(patch(target) for target in order))
    assert all(CALLS[target](world).startswith("loud") for target in TARGETS)
    for target in back:
        assert transaction.revert(target) is True
        assert not CALLS[target](world).startswith("loud")
    assert transaction.applied == []
    assert all(dict(vars(parent_of(world, t))) == dict(before[t]) for t in TARGETS)


@pytest.mark.parametrize("position", range(4))
def test_a_feature_is_applied_whole_or_not_at_all(world, position):
    patches = [patch(target) for target in TARGETS]
    patches.insert(position, patch("Thing.gone"))
    before = {target: vars(parent_of(world, target)).copy() for target in TARGETS}
    transaction = Transaction()
    earlier = patch("Thing.of_class")
    transaction.apply_all((earlier,))
    with pytest.raises(AttributeError, match="gone"):
        transaction.apply_all(tuple(patches))
    assert [applied.patch for applied in transaction.applied] == [earlier]
    assert world.Thing.of_class() == "loud class of Thing"
    transaction.revert_to(0)
    assert all(dict(vars(parent_of(world, t))) == dict(before[t]) for t in TARGETS)


def test_a_missing_wrapper_is_found_before_anything_changes(world):
    broken = patch("function")._replace(wrapper="nowhere:nothing")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        apply(broken)
    assert world.function() == "function"


def test_two_patches_of_one_target_nest_and_come_off_newest_first(world):
    original = world.function
    transaction = Transaction()
    inner, outer = patch("function"), patch("function", "quiet")._replace(id="outer")
    transaction.apply_all((inner, outer))
    assert world.function() == "quiet loud function"
    assert transaction.revert_to(0) == []
    assert world.function is original


def test_the_same_patch_twice_is_an_error_and_leaves_the_first(world):
    transaction = Transaction()
    transaction.apply_all((patch("Thing.static"), patch("function")))
    with pytest.raises(ValueError, match="function is in force already"):
        transaction.apply_all((patch("Thing.method"), patch("function")))
    assert world.function() == "loud function"
    assert world.Thing().method() == "method"
    with pytest.raises(ValueError, match=r"Thing\.method is in force already"):
        transaction.apply_all((patch("Thing.method"), patch("Thing.method")))
    assert world.Thing().method() == "method"


def test_a_patch_stands_while_its_target_leads_to_it(world, monkeypatch):
    applied = apply(patch("Thing.method"))
    assert applied.stands()
    with monkeypatch.context() as changed:
        changed.delattr(world, "Thing")
        assert not applied.stands()
    with monkeypatch.context() as changed:
        changed.delitem(sys.modules, "world")
        assert not applied.stands()
    assert applied.stands()


def test_patches_of_other_objects_are_none_of_its_business(world):
    transaction = Transaction()
    targets = ("Thing.inherited", "Base.inherited", "Thing.method", "Thing.static")
    transaction.apply_all(map(patch, targets))
    assert topmost(transaction.applied) == transaction.applied
    kept = [vars(world.Base)["inherited"], vars(world.Thing)["static"]]
    assert transaction.revert("Thing.inherited") is True
    assert transaction.revert("Thing.method") is True
    assert vars(world.Base)["inherited"] is kept[0]
    assert vars(world.Thing)["static"] is kept[1]


def test_what_others_patched_over_is_reported_and_left_alone(world):
    transaction = Transaction()
    transaction.apply_all((patch("function"), patch("Thing.method")))
    ours = world.function
    world.function = lambda: f"theirs over {ours()}"
    assert transaction.revert("function") is False
    assert [applied.patch.id for applied in transaction.applied] == ["function", "Thing.method"]
    assert transaction.revert_to(0) == ["function"]
    assert world.function() == "theirs over loud function"
    assert world.Thing().method() == "method"


def test_what_others_deleted_is_reported(world):
    transaction = Transaction()
    transaction.apply_all((patch("Thing.inherited"),))
    del world.Thing.inherited
    assert transaction.revert_to(0) == ["Thing.inherited"]
    assert world.Thing().inherited() == "inherited"


def test_a_patch_under_others_is_reverted_and_they_stay(world):
    transaction = Transaction()
    before = vars(world.Thing).copy()
    ids = ("lowest", "middle", "top")
    transaction.apply_all(patch("Thing.method")._replace(id=name) for name in ids)
    assert world.Thing().method() == "loud loud loud method"
    assert transaction.revert("lowest") is True
    assert world.Thing().method() == "loud loud method"
    assert topmost(transaction.applied) == transaction.applied[1:]
    assert transaction.revert("middle") is True
    assert world.Thing().method() == "loud method"
    assert [applied.patch.id for applied in transaction.applied] == ["top"]
    assert transaction.revert("top") is True
    assert dict(vars(world.Thing)) == dict(before)


@pytest.mark.parametrize("place", [1, 2, 3], ids=["under two", "between", "above"])
def test_a_patch_under_that_of_another_package_stays(world, place):
    transaction = Transaction()
    ids = ["lowest", "middle", "top"]
    patches = [patch("Thing.method")._replace(id=name) for name in ids]
    transaction.apply_all(patches[:place])
    theirs = world.Thing.method
    world.Thing.method = lambda self: f"their {theirs(self)}"
    transaction.apply_all(patches[place:])
    said = world.Thing().method()
    assert transaction.revert("lowest") is False
    assert world.Thing().method() == said
    assert [applied.patch.id for applied in transaction.applied] == ids


def test_reverting_what_is_not_in_force(world):
    with pytest.raises(KeyError, match="function"):
        Transaction().revert("function")


def test_references_resolve_through_attributes():
    assert load("collections.abc:Mapping.get").__qualname__ == "Mapping.get"


def test_features_and_patches_are_values():
    feature = Feature("f", "s", (patch("function"),), since="1")
    with pytest.raises(AttributeError):
        feature.name = "other"
    assert hash(feature) == hash(feature._replace())


def test_an_argument_is_found_by_name_or_position():
    for args, kwargs in ((("a", "b"), {}), (("a",), {"second": "b"}), ((), {"second": "b"})):
        assert argument(args, kwargs, 1, "second") == "b"
    assert argument((), {"second": None}, 1, "second") is None  # which was given
    with pytest.raises(IndexError):
        argument(("a",), {}, 1, "second")


def test_an_interrupt_leaves_no_part_of_a_feature(world):
    transaction = Transaction()
    with pytest.raises(KeyboardInterrupt):
        transaction.apply_all(
            (patch("Thing.method"), patch("function", "interrupted", Kind.REPLACE))
        )
    assert transaction.applied == []
    assert world.Thing().method() == "method"


def test_a_guard_is_around_every_wrapper_and_no_replacement(world):
    def guard(wrapper):
        return lambda *args: f"guarded {wrapper(*args)}"

    transaction = Transaction(guard)
    transaction.apply_all((patch("function"), patch("Thing.method", "another", Kind.REPLACE)))
    assert world.function() == "guarded loud function"
    assert world.Thing().method() == "instead of method"
    assert [applied.patch.id for applied in transaction.applied] == ["function", "Thing.method"]


def test_reverting_goes_down_to_a_count_newest_first(world):
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
