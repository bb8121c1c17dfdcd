"""How rows are written: what one says of itself, and what it has from the rows above it."""

import pytest
from packaging.version import Version

from kvpatch.patch import Gap, Kind, Patch, Seam
from kvpatch.rows import Row, feature, gap, replacement, seam

HOME = "kvpatch.patches.one"
FAULT = ("it fails", "vllm-project/vllm#1", "it is fixed")


def written(*seams, **fields):
    return feature(HOME, name="one", summary="works", since="0.16", seams=seams, **fields)


def test_a_row_alone_says_all_but_its_releases_and_self():
    (row,) = written(Row("one.a", "m:C.f", "code:around_f", *FAULT)).seams
    assert row == Patch(
        "one.a", "m:C.f", *FAULT, f"{HOME}.code:around_f", ("self",), since="0.16", before=None
    )
    (row,) = written(replacement("one.a", "m:f", "code:around_f", *FAULT, only_with="x")).seams
    assert (row.parameters, row.kind, row.only_with) == ((), Kind.REPLACE, "x")
    later = written(Row("one.a", "m:f", "code:f", *FAULT, since="0.30"))
    with pytest.raises(LookupError, match=r"the seam one\.a has no patch for vLLM 0\.29"):
        later.at(Version("0.29"))  # without a gap that says why


def test_names_of_the_signature_stand_behind_the_wrapper():
    for text, names in (("(self, a, b)", ("self", "a", "b")), ("()", ()), ("(a)", ("a",))):
        (row,) = written(Row("one.a", "m:C.f", f"code:around_f{text}", *FAULT)).seams
        assert (row.wrapper, row.parameters) == (f"{HOME}.code:around_f", names)


def test_a_feature_has_the_name_of_its_home_unless_it_says_another():
    for home, name in (("kvpatch.patches.two_words", "two-words"), (f"{HOME}.of", "one-of")):
        assert feature(home, since="0.16", summary="works", seams=()).name == name
    assert written().name == "one"
    assert feature(HOME, since="0.16", summary="works", seams=(), name="other").name == "other"


def test_a_seam_of_one_part_is_a_seam():
    (one,) = written(seam(Row("one.a", "m:f", "code:f", *FAULT))).seams
    assert isinstance(one, Seam)


def test_what_a_feature_names_is_in_its_package_or_written_whole():
    one = written(
        Row("one.a", "m:f", "kvpatch.hostdevice.adapt:f", *FAULT),
        Row("one.b", "m:f", ":f", *FAULT),
        wanted="presence:wanted",
        requires="size:require",
        prepare="name:give",
        rules=":RULES",
    )
    assert [row.wrapper for row in one.patches] == ["kvpatch.hostdevice.adapt:f", f"{HOME}:f"]
    assert (one.wanted, one.rules) == (f"{HOME}.presence:wanted", f"{HOME}:RULES")
    assert (one.requires, one.prepare) == (f"{HOME}.size:require", f"{HOME}.name:give")
    assert written().rules is None


def test_a_part_ends_where_the_newer_one_begins_in_whatever_order_they_stand():
    parts = (
        gap("gone", since="0.30"),
        Row("one.new", "m:f", "code:f", *FAULT, since="0.9.1"),
        Row("one.old", since="0.9"),
    )
    (one,) = feature(HOME, name="one", summary="works", since="0.9", seams=[seam(*parts)]).seams
    assert isinstance(one, Seam)
    assert [part.span for part in one.parts] == [
        ("0.30", None),
        ("0.9.1", "0.30"),
        ("0.9", "0.9.1"),
    ]
    assert one.parts[0] == Gap("0.30", None, "gone")
    backwards = written(seam(*reversed(parts)))
    assert {part.span for part in backwards.seams[0].parts} == {part.span for part in one.parts}
    (oldest,) = written(seam(gap("not there"))).seams
    assert oldest.parts == (Gap("0.16", None, "not there"),)


def test_a_row_has_what_it_does_not_say_from_the_row_above_it():
    new, moved, old = written(
        seam(
            replacement("one.new", "m:C.f", "code:f(a)", *FAULT, since="0.30", only_with="x"),
            Row("one.moved", "m:C.g", since="0.20"),
            Row("one.old", wrapper="legacy:f", but="by request", upstream="#2"),
        )
    ).patches
    assert moved == new._replace(id="one.moved", target="m:C.g", since="0.20", before="0.30")
    assert old == moved._replace(
        **{"id": "one.old", "wrapper": f"{HOME}.legacy:f", "why": "as one.new; by request"},
        **{"upstream": "#2", "until": "vLLM 0.20", "since": "0.16", "before": "0.20"},
    )


def test_a_row_alone_says_why_nothing_is_patched_before_it_and_after():
    gaps = {"earlier": "not there", "later": ("0.30", "fixed")}
    row = Row("one.a", "m:f", "code:f", *FAULT, since="0.20", **gaps)
    bare = row._replace(earlier="", later=None)
    assert written(row) == written(seam(gap("fixed", since="0.30"), bare, gap("not there")))
    assert written(bare._replace(earlier="not there")) == written(seam(bare, gap("not there")))


def test_a_row_names_the_same_path_in_another_module_and_has_what_the_feature_needs():
    new, old = written(
        seam(Row("one.new", "m:C.f", "code:f", *FAULT, since="0.30"), Row("one.old", "n.m:")),
        only_with="tiers",
    ).patches
    assert (old.target, old.parameters) == ("n.m:C.f", ("self",))
    assert (new.only_with, old.only_with) == ("tiers", "tiers")


def test_a_fault_that_ended_is_gone_with_the_release_that_ended_it():
    common = {"upstream": "of all", "until": "all is well"}
    (ended,) = written(
        seam(gap("fixed", since="0.30"), Row("one.a", "m:f", "code:f", "why")), **common
    ).patches
    assert (ended.upstream, ended.until) == ("of all", "vLLM 0.30")
    (open_,) = written(Row("one.a", "m:f", "code:f", "why"), **common).patches
    assert (open_.upstream, open_.until) == ("of all", "all is well")
