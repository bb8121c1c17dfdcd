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
    """One change to one object of vLLM or kvcached.

    Attributes:
        id: ``feature.target``, unique.
        target: ``module:attribute.path``.
        why: the fault without the patch.
        upstream: the upstream discussion or source of the fault.
        until: the event that makes the patch unnecessary.
        wrapper: ``module:function`` of kvpatch. For ``WRAP`` a wrapt wrapper
            ``(wrapped, instance, args, kwargs)``; for ``REPLACE`` a function from
            the original object to its replacement.
        parameters: names the target's signature must have.
        since: the first release of vLLM that it applies to.
        before: the first later release that it does not apply to; None if it applies up to
            the newest inspected release.
        kind: wrap a callable or replace an object.
        only_with: what has to be configured for it to do anything: ``WITH_TIERS``,
            ``WITH_SLEEP``, or empty for nothing. Runs without it say nothing of the patch, and
            are not stale when it changes.
    """

    id: str
    target: str
    why: str
    upstream: str
    until: str
    wrapper: str
    parameters: tuple[str, ...]
    since: str
    before: str | None = None
    kind: Kind = Kind.WRAP
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
    """Patches that do the same work in different releases of vLLM.

    In every release of its feature exactly one part applies; a release covered by no part,
    or by several, is refused.
    """

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
    """Patches that are applied completely or not at all.

    Attributes:
        name: its name in the status line.
        summary: its guarantee, one line for the documentation.
        seams: applied in this order, reverted in reverse order; a patch outside a seam
            applies to every release of the feature.
        since: the first release of vLLM that it applies to.
        wanted: ``module:function`` that returns whether this machine needs the
            feature; None means always.
        requires: ``module:function`` that is called with the ``Facts`` of the process before vllm
            is imported, and raises the refusal of what is missing. It changes nothing.
        prepare: ``module:function`` that is called before vllm is imported, after all
            ``requires``.
        rules: ``module:attribute`` of the rules on configurations, see ``rules``.
        before_kvcached: applied before kvcached patches vllm, because it changes how
            kvcached does that.
        optional: disabled on releases that are not validated, where a rule refuses the
            configurations that need it; any other feature stops vLLM there.
        distribution: the distribution that has its rows and their code; set where it is found.
    """

    name: str
    summary: str
    seams: tuple[Seam | Patch, ...]
    since: str
    wanted: str | None = None
    requires: str | None = None
    prepare: str | None = None
    rules: str | None = None
    before_kvcached: bool = False
    optional: bool = False
    distribution: str = "kvpatch"

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
        """Return the patches for a release of vLLM.

        Raises:
            LookupError: a seam has no part for the release, or several.
        """
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
    """Return an argument of a wrapped call, passed by name or by position.

    Args:
        args, kwargs: as wrapt passes them to a wrapper; without ``self`` of a method.
        position: the argument's position in the signature, from 0.
        name: its name there, listed in the row's ``parameters``.

    Raises:
        IndexError: it was not passed.
    """
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
        """Restore the exact original object.

        Returns:
            False if the attribute was replaced again since; it is then left as it is,
            because restoring it would undo that change.
        """
        if vars(self.parent).get(self.attribute) is not self.replacement:
            return False
        if self.inherited:
            delattr(self.parent, self.attribute)
        else:
            setattr(self.parent, self.attribute, self.original)
        return True


Wrapper = Callable[..., Any]


def apply(patch: Patch, guard: Callable[[Wrapper], Wrapper] | None = None) -> AppliedPatch:
    """Apply ``patch``.

    Args:
        patch: the patch to apply.
        guard: applied around every wrapper.

    Raises:
        ImportError, AttributeError: the target or the wrapper does not exist.
    """
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
    """Patches applied so far, newest last.

    Attributes:
        guard: applied around every wrapper.
        applied: the patches in force.
    """

    def __init__(self, guard: Callable[[Wrapper], Wrapper] | None = None) -> None:
        self.guard = guard
        self.applied: list[AppliedPatch] = []

    def apply_all(self, patches: Iterable[Patch]) -> None:
        """Apply every patch, or none of them and raise the error of the one that failed.

        Raises:
            ValueError: a patch is in force already, and would wrap its target twice.
        """
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
        """Revert down to the first ``count`` patches, newest first.

        Returns:
            The ids of patches that other packages have patched over since: they stay in
            force beneath those, and are no longer tracked here.
        """
        displaced = []
        while len(self.applied) > count:
            last = self.applied.pop()
            if not last.revert():
                displaced.append(last.patch.id)
        return displaced

    def revert(self, patch_id: str) -> bool:
        """Revert one patch by id, leaving its feature incomplete; for tests of single patches.

        Later patches of the same object stay in force, over what is beneath it now.

        Returns:
            False if another package has patched over it since; it then stays in force.

        Raises:
            KeyError: no patch with this id is in force.
        """
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
