"""Patches, seams and features: what they carry, how they are applied and reverted."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import wrapt
from packaging.version import Version

from kvpatch.versions import Span


class Outcome(str, Enum):
    """Everything that can become of a feature or a patch."""

    APPLIED = "applied"
    NOT_NEEDED = "not-needed"
    ABSENT = "absent"
    OUTSIDE = "outside"
    MOVED = "moved"
    FAILED = "failed"


class Kind(str, Enum):
    """How a patch takes the place of its target."""

    WRAP = "wrap"
    REPLACE = "replace"


@dataclass(frozen=True)
class Patch:
    """One change to one object of vLLM or kvcached.

    Attributes:
        id: ``feature.target``, unique.
        target: ``module:attribute.path``.
        why: the fault that is there without it.
        upstream: where upstream discusses or owns the fault.
        until: the event that makes the patch unnecessary.
        wrapper: ``module:function`` of kvpatch. For ``WRAP`` a wrapt wrapper
            ``(wrapped, instance, args, kwargs)``; for ``REPLACE`` a function from
            the original object to its replacement.
        parameters: names the target's signature must have.
        since: the first release of vLLM that it is for.
        before: the first later release that it is not for; None while it holds up to the
            newest inspected release.
        kind: wrap a callable or replace an object.
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

    @property
    def span(self) -> Span:
        """The releases of vLLM that it is for."""
        return Span(self.since, self.before)


@dataclass(frozen=True)
class Gap:
    """Releases of vLLM in which a seam needs no patch, and why."""

    since: str
    before: str | None
    why: str

    @property
    def span(self) -> Span:
        """The releases without a patch."""
        return Span(self.since, self.before)


@dataclass(frozen=True)
class Seam:
    """Patches that do the same work in different releases of vLLM.

    In every release that its feature is for, exactly one part applies: a release that no
    part names, or two do, is refused.
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
        """Return the parts that apply to a release: one, unless a range is wrong."""
        return [part for part in self.parts if release in part.span]


def seam(*parts: Patch | Gap) -> Seam:
    """Return a seam of patches and gaps."""
    return Seam(parts)


@dataclass(frozen=True)
class Feature:
    """Patches that are only right together.

    Attributes:
        name: as the status line has it.
        summary: its guarantee, one line for the documentation.
        seams: applied in this order, reverted in the opposite one; a patch by itself is for
            every release of the feature.
        since: the first release of vLLM that it is for.
        wanted: ``module:function`` that returns whether this machine needs the
            feature; None means always.
        prepare: ``module:function`` that is called before vllm is imported.
        rules: ``module:attribute`` of the configurations that it refuses, see ``rules``.
        before_kvcached: applied before kvcached patches vllm, because it changes how
            kvcached does that.
        optional: on releases that are not validated it stays off, and a rule refuses what
            needs it; the others stop vLLM there.
    """

    name: str
    summary: str
    seams: tuple[Seam | Patch, ...]
    since: str
    wanted: str | None = None
    prepare: str | None = None
    rules: str | None = None
    before_kvcached: bool = False
    optional: bool = False

    @property
    def span(self) -> Span:
        """The releases of vLLM that it is for."""
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
        position: where the argument stands in the signature, from 0.
        name: its name there; rows name it in ``parameters``.

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


@dataclass
class AppliedPatch:
    """A patch in force, and what it takes to revert it."""

    patch: Patch
    parent: Any
    attribute: str
    original: Any
    replacement: Any
    inherited: bool

    def revert(self) -> bool:
        """Put the exact original object back.

        Returns:
            False when somebody else has replaced the attribute since; it is then
            left alone, because removing it would undo their change.
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
    """Put ``patch`` in force.

    Args:
        patch: what to apply.
        guard: put around every wrapper, for what all of them have in common.

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


@dataclass
class Transaction:
    """Patches applied so far, newest last.

    Attributes:
        guard: put around every wrapper.
        applied: the patches in force.
    """

    guard: Callable[[Wrapper], Wrapper] | None = None
    applied: list[AppliedPatch] = field(default_factory=list)

    def apply_all(self, patches: Iterable[Patch]) -> None:
        """Apply every patch, or none of them and raise what stopped it.

        Raises:
            ValueError: one of them is in force already; twice would wrap twice.
        """
        begun = len(self.applied)
        try:
            for patch in patches:
                if patch.id in (applied.patch.id for applied in self.applied):
                    raise ValueError(f"{patch.id} is in force already")
                self.applied.append(apply(patch, self.guard))
        except BaseException:
            self.revert_to(begun)
            raise

    def revert_to(self, count: int) -> list[str]:
        """Revert down to the first ``count`` patches, newest first.

        Returns:
            The ids of those that others have patched over since: they are forgotten
            here and stay in force under the others'.
        """
        displaced = []
        while len(self.applied) > count:
            last = self.applied.pop()
            if not last.revert():
                displaced.append(last.patch.id)
        return displaced

    def revert(self, patch_id: str) -> bool:
        """Revert one patch by id, leaving its feature incomplete: for tests of the parts.

        Returns:
            False when others have patched over it since; it stays in force then.

        Raises:
            KeyError: no patch of that id is in force.
        """
        for applied in self.applied:
            if applied.patch.id == patch_id:
                if not applied.revert():
                    return False
                self.applied.remove(applied)
                return True
        raise KeyError(patch_id)
