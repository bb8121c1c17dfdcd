"""The gates, cheapest first: environment, metadata, release, target, signature.

Every gate returns its result instead of raising, so that the same code decides at
start-up and fills the tables of the documentation; ``activation`` raises.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import wrapt
from packaging.version import Version

from kvpatch import distributions, supported
from kvpatch.environ import ALLOW_VLLM, KVCACHED, KVCACHED_SWITCHES, OURS, SWITCH
from kvpatch.patch import Feature, Outcome, Patch, load
from kvpatch.refusal import Refusal
from kvpatch.versions import Facts, Installed, in_words

# Finds a target and returns a function that reads the names of its parameters: by import at
# start-up, from recorded signatures in the compatibility matrix.
Look = Callable[[str], Callable[[], Collection[str]]]


OF_RELEASES = ("KVP106", "KVP107")  # the refusals of a release that is not validated


class Verdict(NamedTuple):
    """The outcome of a patch or a feature, and its reason."""

    outcome: Outcome
    reason: str = ""
    code: str = "KVP201"

    @property
    def passed(self) -> bool:
        """Whether the next gate may be checked."""
        return self.outcome is Outcome.APPLIED


PASSED = Verdict(Outcome.APPLIED)


def supported_versions(package: str) -> Sequence[str]:
    """Return the validated versions of ``vllm`` or ``kvcached``."""
    return supported.validated() if package == "vllm" else supported.KVCACHED


def check_environment(environment: Mapping[str, str] = os.environ) -> Refusal | None:
    """Gate 1: every variable can be read, and kvcached's switches do not contradict ours."""
    return next(environment_refusals(environment), None)


def environment_refusals(environment: Mapping[str, str]) -> Iterator[Refusal]:
    """Iterate over all that gate 1 refuses."""
    if not (SWITCH.is_on(environment) or SWITCH.is_off(environment)):
        yield Refusal(
            f"{SWITCH}={environment[SWITCH.name]} is not a known value",
            "it would be unclear whether kvpatch is on",
            f"set {SWITCH} to 1, true, on or yes to switch it on, or to 0, false, off or no "
            "(or leave it unset) to switch it off",
            code="KVP101",
        )
    for variable in (*OURS, *KVCACHED):
        text = variable.read(environment)
        # What is set to nothing is unset to kvpatch, and no number to kvcached.
        unset = not text if variable in OURS else variable.name not in environment
        if variable.parse is None or unset:
            continue
        try:
            variable.parse(text)
        except ValueError as error:
            why, _, remedy = str(error).partition("; ")
            yield Refusal(
                f"{variable}={text} cannot be read",
                why,
                f"{remedy}, or unset {variable}, or set {SWITCH}=0",
                code="KVP113",
            )
    for name in KVCACHED_SWITCHES:
        setting = environment.get(name.name)
        # Read exactly as kvcached reads it; empty is equivalent to unset.
        if setting and setting.lower() not in ("1", "true"):
            yield Refusal(
                f"{SWITCH} is on but {name}={setting}",
                "kvpatch requires kvcached's memory and this switches kvcached off",
                f"unset {name} (kvpatch sets it) or set {SWITCH}=0",
                code="KVP102",
            )


def check_installed(
    package: str,
    every: Sequence[Installed],
    environment: Mapping[str, str] = os.environ,
    lifted: Container[str] = (),
) -> Refusal | None:
    """Gates 2 and 3: a package is installed, in a validated release.

    Args:
        package: ``vllm`` or ``kvcached``.
        every: its entries from ``versions.installed``; the first one is used.
        environment: may name one vLLM release to start although not validated.
        lifted: codes of refusals that a verdict of ``kvpatch verify`` lifts.
    """
    if not every:
        newest = supported_versions(package)[-1]
        in_few_words = supported.in_ranges if package == "vllm" else in_words
        wanted = f"{package} {in_few_words(supported_versions(package))}"
        return Refusal(
            f"{package} is not installed as a distribution in this environment",
            f"kvpatch reads its version from there and supports {wanted}",
            f'install it with pip install "{package}=={newest}", or set {SWITCH}=0',
            code="KVP103",
        )
    found = every[0]
    if any(other.public != found.public for other in every):
        names = " and ".join(f"{one.distribution} {one.text}" for one in every)
        return Refusal(
            f"{names} are both installed",
            f"they share the folder {package} and only one of them is really in it",
            f"uninstall both and install one of them again, or set {SWITCH}=0",
            code="KVP104",
        )
    name = f"{found.distribution} {found.text}"
    fault = supported.fault_of(found) if package == "vllm" and found.version else None
    if fault is not None:
        return Refusal(
            f"{name} is an unsupported release",
            fault.why,
            f"install {_wanted_instead(package, found)}, or set {SWITCH}=0",
            code="KVP111",
        )
    if allowed_by_name(found, environment):
        return None
    refusal = _not_validated(package, found)
    return None if refusal is None or refusal.code in lifted else refusal


def _wanted_instead(package: str, found: Installed) -> str:
    # A patch release may be one that no range of validated ones has, although it is inside of it.
    if package != "vllm":
        return f"{package} {in_words(supported.KVCACHED)}"
    return f"vllm {supported.nearest(found)} or another release that `kvpatch matrix` shows"


def _not_validated(package: str, found: Installed) -> Refusal | None:
    name = f"{found.distribution} {found.text}"
    if found.version is None:
        return Refusal(
            f'{found.distribution} has the version "{found.text}"',
            "that is not a valid PEP 440 version and cannot be compared with the validated ones",
            f"install {_wanted_instead(package, found)}, or set {SWITCH}=0",
            code="KVP105",
        )
    if found.version.is_prerelease:
        kind = "development build" if found.version.is_devrelease else "pre-release"
        return Refusal(
            f"{name} is a {kind}",
            "its code was not validated with kvpatch and may differ from the release's",
            f"install {_wanted_instead(package, found)}, or set {SWITCH}=0",
            code="KVP106",
        )
    if not found.is_one_of(supported_versions(package)):
        wanted = _wanted_instead(package, found)
        named = f", set {ALLOW_VLLM}={found.text} to try it all the same"
        return Refusal(
            f"{name} is not a validated release",
            "it has not passed the full engine test matrix",
            f"install {wanted}{named if package == 'vllm' else ''}, or set {SWITCH}=0",
            code="KVP107",
        )
    return None


def allowed_by_name(found: Installed, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``KVPATCH_ALLOW_VLLM`` names this vLLM."""
    return found.package == "vllm" and ALLOW_VLLM.read(environment) in (found.text, found.public)


def imported(target: str) -> Callable[[], Collection[str]]:
    """Find ``module:attribute.path`` by importing it.

    Raises:
        AttributeError: the module has no such attribute.
        Exception: any error that importing the module raises.
    """
    module, _, path = target.partition(":")
    _, _, original = wrapt.resolve_path(importlib.import_module(module), path)
    function = original.__func__ if isinstance(original, staticmethod | classmethod) else original
    return lambda: _parameters(function)


def _parameters(function: Any) -> Collection[str]:
    """Return the names in a signature; ``inspect`` takes longer, and most targets are plain."""
    if type(function) is FunctionType and not vars(function):
        code = function.__code__
        variable = bool(code.co_flags & inspect.CO_VARARGS) + bool(
            code.co_flags & inspect.CO_VARKEYWORDS
        )
        return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + variable]
    return inspect.signature(function).parameters


def check_target(patch: Patch, look: Look = imported) -> Verdict:
    """Gates 4 and 5: the target exists, and its signature has the names that the patch uses."""
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


def applies(
    feature: Feature,
    vllm: Installed,
    environment: Mapping[str, str] = os.environ,
    lifted: Container[str] = (),
) -> bool:
    """Return whether a feature applies to an installed vLLM.

    That is validated, allowed by name, or verified here or about to be.
    """
    if supported.is_validated(vllm, feature.span):
        return True
    if supported.release_of(vllm) not in feature.span:
        return False
    if any(code in lifted for code in OF_RELEASES):
        return True
    return not feature.optional and allowed_by_name(vllm, environment)


def check_feature(
    feature: Feature,
    vllm: Installed,
    look: Look = imported,
    environment: Mapping[str, str] = os.environ,
    lifted: Container[str] = (),
) -> Verdict:
    """Check the gates of one feature, for an installed vLLM.

    Args:
        feature: the feature.
        vllm: installed here, or in a cell of the matrix.
        look: finds a target.
        environment: may name one vLLM release to start although not validated.
        lifted: as for ``check_installed``.
    """
    if feature.wanted is not None and not load(feature.wanted)():
        return Verdict(Outcome.NOT_NEEDED)
    if not applies(feature, vllm, environment, lifted):
        return Verdict(Outcome.OUTSIDE, f"it is not validated on {vllm.distribution} {vllm.text}")
    try:
        needed = feature.at(supported.release_of(vllm))
    except LookupError as error:
        return Verdict(Outcome.FAILED, str(error), code="KVP203")
    if not needed:
        return Verdict(Outcome.NOT_NEEDED)
    for patch in needed:
        verdict = check_target(patch, look)
        if not verdict.passed:
            return verdict
    return PASSED


def by_range(feature: Feature, patch: Patch, vllm: str) -> Verdict:
    """Return the outcome of a patch on a release whose targets are as they were inspected."""
    if Version(vllm) not in patch.span:
        return Verdict(Outcome.NOT_NEEDED, f"its range is {patch.span}")
    if not applies(feature, Installed.release("vllm", vllm), {}):
        return Verdict(Outcome.OUTSIDE, f"vllm {vllm} is not validated")
    return PASSED


def require(features: Iterable[Feature], facts: Facts) -> None:
    """Check what must be there before vllm is imported, beside the packages.

    Raises:
        Refusal: something is not.
    """
    refused = distributions.refusal(facts.vllm.for_cpus, facts.environment)
    if refused is not None:
        raise refused
    for feature in features:
        if feature.requires is not None:
            load(feature.requires)(facts)


def unresolved(feature: Feature, release: Version) -> str:
    """Return what a feature names on a release and this installation does not have, or nothing.

    No module of the release is imported.
    """
    named = (feature.wanted, feature.requires, feature.prepare, feature.rules)
    try:
        for one in named:
            if one is not None:
                load(one)
        for patch in feature.at(release):
            module = patch.wrapper.partition(":")[0]
            if importlib.util.find_spec(module) is None:
                return f"there is no {module}"
    except (ImportError, AttributeError, LookupError) as error:
        return str(error)
    return ""


def refusal(feature: Feature, verdict: Verdict) -> Refusal | None:
    """Return the refusal that the outcome of a feature requires, or None."""
    if verdict.outcome in (Outcome.APPLIED, Outcome.NOT_NEEDED):
        return None
    if feature.optional and verdict.outcome is Outcome.OUTSIDE:
        return None
    why, remedy = verdict.reason, "install versions from docs/support.md, or set KVPATCH=0"
    if verdict.code == "KVP203":
        what = f"the feature {feature.name} has a hole on this release"
        return Refusal(what, why, remedy, code="KVP203")
    what = f"the feature {feature.name} cannot be applied ({verdict.outcome.value})"
    return Refusal(what, why, remedy, code="KVP201")
