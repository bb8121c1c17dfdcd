"""The gates, cheapest first: environment, metadata, specifier, target, signature.

Every gate answers with an outcome and a reason instead of raising, so that the
same code decides at start-up and fills the tables of the documentation.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import wrapt
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvpatch.bootstrap import OFF_VALUES, ON_VALUES, SWITCH
from kvpatch.errors import Refusal
from kvpatch.patch import Feature, Outcome, Patch, load
from kvpatch.registry import faults
from kvpatch.versions import Installed, installed

ALLOW_VLLM = "KVPATCH_ALLOW_VLLM"
_BOUNDS = ("==", ">=", "<=")
_OR = " or "
# Finds a target and returns how to read its parameters' names: by import at start-up,
# from recorded signatures in the compatibility matrix.
Look = Callable[[str], Callable[[], Collection[str]]]
KVCACHED_SWITCHES = ("ENABLE_KVCACHED", "KVCACHED_AUTOPATCH")


@dataclass(frozen=True)
class Verdict:
    """What a gate decided, and why."""

    outcome: Outcome
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the next gate may be asked."""
        return self.outcome is Outcome.APPLIED


PASSED = Verdict(Outcome.APPLIED)


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Gate 1: the switch has a value we know and kvcached's do not contradict it.

    Raises:
        Refusal: ``KVPATCH`` is none of the allowed values, or kvcached is switched off.
    """
    value = environment.get(SWITCH, "").strip().lower()
    if value not in ON_VALUES + OFF_VALUES:
        raise Refusal(
            f"{SWITCH}={environment[SWITCH]} is not a value kvpatch knows",
            "guessing would leave you unsure whether it is on",
            f"set {SWITCH} to 1, true or on to switch it on, or to 0 (or leave it unset) "
            "to switch it off",
            code="KVP101",
        )
    for name in KVCACHED_SWITCHES:
        setting = environment.get(name)
        # Read exactly as kvcached reads it; an empty one is as good as unset.
        if setting and setting.lower() not in ("1", "true"):
            raise Refusal(
                f"{SWITCH} is on but {name}={setting}",
                "kvpatch works on kvcached's memory and this switches kvcached off",
                f"unset {name} (kvpatch sets it for you) or set {SWITCH}=0",
                code="KVP102",
            )


def check_installed(
    package: str, ranges: str, environment: Mapping[str, str] = os.environ
) -> Installed:
    """Gate 2: the package is installed, as a release.

    Args:
        package: ``vllm`` or ``kvcached``.
        ranges: the supported versions, for the sentence.

    Raises:
        Refusal: it is missing, installed twice, or not a release.
    """
    every = installed(package)
    if not every:
        raise Refusal(
            f"{package} is not installed as a distribution in this environment",
            f"kvpatch reads its version from there and runs on {package} {in_words(ranges)}",
            f'install it with pip install "{package}{ranges.split(_OR)[-1]}", or set {SWITCH}=0',
            code="KVP103",
        )
    found = every[0]
    if any(other.public != found.public for other in every):
        names = " and ".join(f"{one.distribution} {one.text}" for one in every)
        raise Refusal(
            f"{names} are both installed",
            f"they share the folder {package} and only one of them is really in it",
            f"uninstall both and install one of them again, or set {SWITCH}=0",
            code="KVP104",
        )
    if package == "vllm" and allowed_by_name(found, environment):
        return found
    if found.version is None:
        raise Refusal(
            f'{found.distribution} has the version "{found.text}"',
            "that is not a version by PEP 440 and cannot be compared with the tested ones",
            f"install {package} {in_words(ranges)}, or set {SWITCH}=0",
            code="KVP105",
        )
    if found.version.is_prerelease:
        kind = "development build" if found.version.is_devrelease else "pre-release"
        raise Refusal(
            f"{found.distribution} {found.text} is a {kind}",
            "its code was never tested with kvpatch and may differ from the release's",
            f"install {package} {in_words(ranges)}, or set {SWITCH}=0",
            code="KVP106",
        )
    return found


def allowed_by_name(found: Installed, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the operator named this very vLLM as one to try."""
    return environment.get(ALLOW_VLLM, "").strip() in (found.text, found.public)


def alternatives(specifier: str) -> list[SpecifierSet]:
    """Return the parts of a range between ``or``, which PEP 440 has no word for."""
    return [SpecifierSet(part) for part in specifier.split(_OR)]


def in_words(specifier: str) -> str:
    """Return a range as a sentence has it: releases by their names, or what it was."""
    parts = specifier.split(_OR)
    if not all(part.startswith("==") for part in parts):
        return specifier
    *most, last = (part.removeprefix("==") for part in parts)
    return f"{', '.join(most)} or {last}" if most else last


def in_range(found: Installed, specifier: str) -> bool:
    """Gate 3: whether it is a release inside ``specifier``; local parts are ignored."""
    if found.version is None:
        return False
    # Said explicitly, because packaging's default differs between its releases.
    return any(part.contains(found.version, prereleases=False) for part in alternatives(specifier))


def check_range(
    found: Installed, specifier: str, environment: Mapping[str, str] = os.environ
) -> None:
    """Gate 3 for the whole of kvpatch.

    Raises:
        Refusal: the version was never tested and the operator did not name it.
    """
    if in_range(found, specifier):
        return
    if found.package == "vllm" and allowed_by_name(found, environment):
        return
    of_vllm = found.package == "vllm"
    remedy = f"install {found.package} {in_words(specifier)}"
    if of_vllm:
        remedy += f", set {ALLOW_VLLM}={found.text} to try it untested,"
    raise Refusal(
        f"{found.distribution} {found.text} is outside the tested range",
        next(
            (fault.why for fault in faults.FAULTS if of_vllm and in_range(found, fault.vllm)),
            "no engine on it was compared with plain vLLM's in full",
        ),
        f"{remedy} or set {SWITCH}=0",
        code="KVP107",
    )


def imported(target: str) -> Callable[[], Collection[str]]:
    """Look at ``module:attribute.path`` by importing it.

    Raises:
        AttributeError: the module has no such attribute. Whatever its import raises.
    """
    module, _, path = target.partition(":")
    _, _, original = wrapt.resolve_path(importlib.import_module(module), path)
    function = original.__func__ if isinstance(original, staticmethod | classmethod) else original
    return lambda: inspect.signature(function).parameters


def check_target(patch: Patch, look: Look = imported) -> Verdict:
    """Gates 4 and 5: the target exists and its signature has the names we use."""
    try:
        parameters = look(patch.target)
    except AttributeError:
        return Verdict(Outcome.ABSENT, f"{patch.target} does not exist")
    except Exception as error:
        reason = f"{patch.target} cannot be imported ({type(error).__name__}: {error})"
        return Verdict(Outcome.ABSENT, reason)
    if not patch.parameters:
        return PASSED
    try:
        names = set(parameters())
    except (TypeError, ValueError) as error:
        return Verdict(Outcome.MOVED, f"{patch.target} has no signature to read ({error})")
    missing = [name for name in patch.parameters if name not in names]
    if missing:
        return Verdict(Outcome.MOVED, f"{patch.target} no longer takes {', '.join(missing)}")
    return PASSED


def closest(found: Installed, specifier: str) -> Version:
    """The version whose rows are for ``found``: its own, or for one that the operator
    named the nearest tested release, at or below it where there is one.
    """
    if found.version is not None and in_range(found, specifier):
        return found.version
    tested = sorted(
        Version(part.version)
        for parts in alternatives(specifier)
        for part in parts
        if part.operator in _BOUNDS
    )
    if found.version is None:
        return tested[-1]
    return max((bound for bound in tested if bound <= found.version), default=tested[0])


def rows(feature: Feature, vllm: Installed, kvcached: Installed) -> tuple[Patch, ...]:
    """The rows of ``feature`` that are for the installed versions.

    Where a seam moved between releases, each of its places is a row with a range of
    its own; the others are not needed.
    """
    found = _rows_for(feature, vllm.version, kvcached.version)
    # A release newer than every row, which the operator named, has its neighbour's. One that is
    # older has what the rows say of it, which may be nothing: what they mend came later.
    neighbours = (closest(vllm, feature.vllm), closest(kvcached, feature.kvcached))
    if found or (vllm.version is not None and vllm.version < neighbours[0]):
        return found
    return _rows_for(feature, *neighbours)


def _rows_for(
    feature: Feature, vllm: Version | None, kvcached: Version | None
) -> tuple[Patch, ...]:
    return tuple(
        patch
        for patch in feature.patches
        if vllm is not None
        and kvcached is not None
        and SpecifierSet(patch.vllm).contains(vllm, prereleases=True)
        and SpecifierSet(patch.kvcached).contains(kvcached, prereleases=True)
    )


def check_feature(
    feature: Feature,
    vllm: Installed,
    kvcached: Installed,
    look: Look = imported,
    environment: Mapping[str, str] = os.environ,
) -> Verdict:
    """All gates that a feature has to itself, for the installed versions."""
    if feature.wanted is not None and not load(feature.wanted)():
        return Verdict(Outcome.NOT_NEEDED)
    tried = allowed_by_name(vllm, environment) and not feature.optional
    for found, specifier in ((vllm, feature.vllm), (kvcached, feature.kvcached)):
        if not in_range(found, specifier) and not (found is vllm and tried):
            return Verdict(
                Outcome.OUTSIDE, f"{found.distribution} {found.text} is outside {specifier}"
            )
    needed = rows(feature, vllm, kvcached)
    if not needed:
        return Verdict(Outcome.NOT_NEEDED)
    for patch in needed:
        verdict = check_target(patch, look)
        if not verdict.passed:
            return verdict
    return PASSED


def refusal(feature: Feature, verdict: Verdict) -> Refusal | None:
    """Return what vLLM does not start with when this became of a feature, if it does not."""
    if verdict.outcome in (Outcome.APPLIED, Outcome.NOT_NEEDED):
        return None
    if feature.optional and verdict.outcome is Outcome.OUTSIDE:
        return None
    return Refusal(
        f"the feature {feature.name} cannot be applied ({verdict.outcome.value})",
        verdict.reason,
        "install versions from docs/support.md, or set KVPATCH=0",
        code="KVP201",
    )
