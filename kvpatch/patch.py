"""Patches and features: what they carry, how they are applied and taken back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import wrapt


class Outcome(str, Enum):
    """Everything that can become of a feature or a patch; there are no others."""

    APPLIED = "applied"
    NOT_NEEDED = "not-needed"
    OFF = "off"
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
        vllm: PEP 440 range of vLLM in which the target means what we take it to mean.
        kvcached: the same for kvcached.
        kind: wrap a callable or replace an object.
    """

    id: str
    target: str
    why: str
    upstream: str
    until: str
    wrapper: str
    parameters: tuple[str, ...]
    vllm: str
    kvcached: str
    kind: Kind = Kind.WRAP


@dataclass(frozen=True)
class Feature:
    """Patches that are only right together.

    Attributes:
        name: what the status line calls it.
        summary: one line for the documentation.
        vllm: PEP 440 range of vLLM that was tested, closed; or several with ``or`` between.
        kvcached: the same for kvcached.
        patches: applied in this order, reverted in the opposite one.
        wanted: ``module:function`` that says whether this machine needs the
            feature; None means always.
        before_kvcached: applied before kvcached patches vllm, because it changes how
            kvcached does that.
        optional: outside its range it stays off, and a rule of ``configuration`` refuses
            what needs it; the others stop vLLM there.
    """

    name: str
    summary: str
    vllm: str
    kvcached: str
    patches: tuple[Patch, ...]
    wanted: str | None = None
    before_kvcached: bool = False
    optional: bool = False


def load(reference: str) -> Any:
    """Return the object that ``module:attribute.path`` names."""
    module, _, attribute = reference.partition(":")
    target: Any = importlib.import_module(module)
    for name in attribute.split("."):
        target = getattr(target, name)
    return target


@dataclass
class AppliedPatch:
    """A patch in force, and what it takes to undo it."""

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
            left alone, because taking it away would undo their change.
        """
        if vars(self.parent).get(self.attribute) is not self.replacement:
            return False
        if self.inherited:
            delattr(self.parent, self.attribute)
        else:
            setattr(self.parent, self.attribute, self.original)
        return True


def apply(patch: Patch) -> AppliedPatch:
    """Put ``patch`` in force.

    Raises:
        ImportError, AttributeError: the target or the wrapper does not exist.
    """
    module, _, path = patch.target.partition(":")
    parent, attribute, original = wrapt.resolve_path(importlib.import_module(module), path)
    wrapper: Callable[..., Any] = load(patch.wrapper)
    if patch.kind is Kind.WRAP:
        replacement = wrapt.FunctionWrapper(original, wrapper)
    else:
        replacement = wrapper(original)
    applied = AppliedPatch(
        patch, parent, attribute, original, replacement, attribute not in vars(parent)
    )
    setattr(parent, attribute, replacement)
    return applied


@dataclass
class Transaction:
    """Patches applied so far, newest last."""

    applied: list[AppliedPatch] = field(default_factory=list)

    def apply_all(self, patches: tuple[Patch, ...]) -> None:
        """Apply every patch, or none of them and raise what stopped it.

        Raises:
            ValueError: one of them is in force already; twice would wrap twice.
        """
        begun = len(self.applied)
        try:
            for patch in patches:
                if patch.id in (applied.patch.id for applied in self.applied):
                    raise ValueError(f"{patch.id} is in force already")
                self.applied.append(apply(patch))
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
        """Revert one patch by id, leaving its feature in part: for tests of the parts.

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
