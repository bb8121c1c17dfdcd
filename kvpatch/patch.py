"""Patches, seams and features: their fields, and how they are applied and reverted."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import wrapt
from packaging.version import Version

from kvpatch.versions import Span


class Outcome(str, Enum):
    """The possible outcomes of a feature or a patch."""

    APPLIED = "applied"
    NOT_NEEDED = "not-needed"
    ABSENT = "absent"
    OUTSIDE = "outside"
    MOVED = "moved"
    FAILED = "failed"


class Kind(str, Enum):
    """How a patch replaces its target."""

    WRAP = "wrap"
    REPLACE = "replace"


WITH_TIERS = "secondary tiers"
WITH_SLEEP = "sleep mode"


class Patch(NamedTuple):
    """One change to one object of vLLM or kvcached."""

    id: str  # ``feature.target``, unique
    target: str  # ``module:attribute.path``
    why: str  # the fault without the patch
    upstream: str  # the upstream discussion or source of the fault
    until: str  # the event that makes the patch unnecessary
    # ``module:function`` of kvpatch: for ``WRAP`` a wrapt wrapper, for ``REPLACE`` a function from
    # the original object to its replacement.
    wrapper: str
    parameters: tuple[str, ...]  # names the target's signature must have
    since: str
    before: str | None = None  # None if it applies up to the newest inspected release
    kind: Kind = Kind.WRAP
    # What has to be configured for it to do anything: ``WITH_TIERS``, ``WITH_SLEEP``, or empty.
    # Runs without it say nothing of the patch, and are not stale when it changes.
    only_with: str = ""

    @property
    def span(self) -> Span:
        """The releases of vLLM that it applies to."""
        return Span(self.since, self.before)


class Gap(NamedTuple):
    """Releases of vLLM in which a seam needs no patch, and the reason."""

    since: str
    before: str | None
    why: str

    @property
    def span(self) -> Span:
        """The releases without a patch."""
        return Span(self.since, self.before)


class Seam(NamedTuple):
    """Patches that do the same work in different releases, of which each has exactly one."""

    parts: tuple[Patch | Gap, ...]

    @property
    def name(self) -> str:
        """The id of its first patch."""
        return self.patches[0].id

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Its patches, for all releases."""
        return tuple(part for part in self.parts if isinstance(part, Patch))

    def at(self, release: Version) -> list[Patch | Gap]:
        """Return the parts that apply to a release; exactly one if the ranges are correct."""
        return [part for part in self.parts if release in part.span]


class Feature(NamedTuple):
    """Patches that are applied completely or not at all."""

    name: str  # in the status line
    summary: str  # its guarantee, one line for the documentation
    seams: tuple[Seam | Patch, ...]  # applied in order; a patch outside a seam to every release
    since: str
    wanted: str | None = None  # ``module:function``: whether this machine needs it
    # ``module:function`` that is called with the ``Facts`` of the process before vllm is imported,
    # and raises the refusal of what is missing. It changes nothing.
    requires: str | None = None
    prepare: str | None = None  # ``module:function``, called before vllm, after all ``requires``
    rules: str | None = None  # ``module:attribute`` of the rules on configurations, see ``rules``
    before_kvcached: bool = False  # applied before kvcached patches vllm, because it changes how
    # Disabled on releases that are not validated, where a rule refuses the configurations that need
    # it; any other feature stops vLLM there.
    optional: bool = False
    distribution: str = "kvpatch"  # that has its rows and their code; set where it is found

    @property
    def span(self) -> Span:
        """The releases of vLLM that it applies to."""
        return Span(self.since)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Its patches, for all releases."""
        return tuple(patch for one in self._seams() for patch in one.patches)

    def _seams(self) -> Iterator[Seam]:
        for one in self.seams:
            yield one if isinstance(one, Seam) else Seam((one,))

    def at(self, release: Version) -> tuple[Patch, ...]:
        """Return the patches for a release; LookupError if a seam has no part, or several."""
        chosen = []
        for one in self._seams():
            parts = one.at(release)
            if len(parts) != 1:
                found = " and ".join(
                    part.id if isinstance(part, Patch) else f"no patch ({part.why})"
                    for part in parts
                )
                raise LookupError(
                    f"the seam {one.name} has {found or 'no patch'} for vLLM {release}"
                )
            chosen += [part for part in parts if isinstance(part, Patch)]
        return tuple(chosen)


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    """Return a call's argument, by name or position without ``self``; IndexError without one."""
    return kwargs[name] if name in kwargs else args[position]


def load(reference: str) -> Any:
    """Return the object that ``module:attribute.path`` names."""
    module, _, attribute = reference.partition(":")
    target: Any = importlib.import_module(module)
    for name in attribute.split("."):
        target = getattr(target, name)
    return target


class AppliedPatch(NamedTuple):
    """An applied patch, and the data needed to revert it."""

    patch: Patch
    parent: Any
    attribute: str
    original: Any
    replacement: Any
    inherited: bool

    def reached_from(self, owner: Any) -> bool:
        """Return whether an owner of the attribute, or a base class of it, has the replacement."""
        return inspect.getattr_static(owner, self.attribute, None) is self.replacement

    def stands(self) -> bool:
        """Return whether the target still leads to the replacement."""
        module, _, path = self.patch.target.partition(":")
        try:
            parent, _, _ = wrapt.resolve_path(importlib.import_module(module), path)
        except (ImportError, AttributeError):
            return False
        return self.reached_from(parent)

    def revert(self) -> bool:
        """Restore the exact original object; return False, and leave it, if replaced since."""
        if vars(self.parent).get(self.attribute) is not self.replacement:
            return False
        if self.inherited:
            delattr(self.parent, self.attribute)
        else:
            setattr(self.parent, self.attribute, self.original)
        return True


Wrapper = Callable[..., Any]


def apply(patch: Patch, guard: Callable[[Wrapper], Wrapper] | None = None) -> AppliedPatch:
    """Apply ``patch``, guarded; ImportError or AttributeError without its target or wrapper."""
    module, _, path = patch.target.partition(":")
    parent, attribute, original = wrapt.resolve_path(importlib.import_module(module), path)
    wrapper: Wrapper = load(patch.wrapper)
    if patch.kind is Kind.WRAP:
        replacement = wrapt.FunctionWrapper(original, guard(wrapper) if guard else wrapper)
    else:
        replacement = wrapper(original)
    applied = AppliedPatch(
        patch, parent, attribute, original, replacement, attribute not in vars(parent)
    )
    setattr(parent, attribute, replacement)
    return applied


def topmost(applied: Iterable[AppliedPatch]) -> list[AppliedPatch]:
    """Return the newest patch of each object; the others of the object are beneath it."""
    return list({(id(one.parent), one.attribute): one for one in applied}.values())


class Transaction:
    """Patches in force, newest last, with a guard around every wrapper."""

    def __init__(self, guard: Callable[[Wrapper], Wrapper] | None = None) -> None:
        self.guard = guard
        self.applied: list[AppliedPatch] = []

    def apply_all(self, patches: Iterable[Patch]) -> None:
        """Apply every patch, or none and raise the error of the one that failed, or is in force."""
        begun = len(self.applied)
        ids = {applied.patch.id for applied in self.applied}
        try:
            for patch in patches:
                if patch.id in ids:
                    raise ValueError(f"{patch.id} is in force already")
                self.applied.append(apply(patch, self.guard))
                ids.add(patch.id)
        except BaseException:
            self.revert_to(begun)
            raise

    def revert_to(self, count: int) -> list[str]:
        """Revert down to the first ``count``, newest first; return ids that others patched over."""
        displaced = []
        while len(self.applied) > count:
            last = self.applied.pop()
            if not last.revert():
                displaced.append(last.patch.id)
        return displaced

    def revert(self, patch_id: str) -> bool:
        """Revert one patch by id, for tests; return False if another package patched over it."""
        for at, applied in enumerate(self.applied):
            if applied.patch.id == patch_id:
                return self._take_out(at)
        raise KeyError(patch_id)

    def _take_out(self, at: int) -> bool:
        one = self.applied[at]
        later = [
            index
            for index, applied in enumerate(self.applied)
            if index > at and applied.parent is one.parent and applied.attribute == one.attribute
        ]
        above: list[AppliedPatch] = []
        for index in (*reversed(later), at):
            if not self.applied[index].revert():
                for taken in reversed(above):
                    setattr(taken.parent, taken.attribute, taken.replacement)
                return False
            above.append(self.applied[index])
        for index in later:
            self.applied[index] = apply(self.applied[index].patch, self.guard)
        del self.applied[at]
        return True
