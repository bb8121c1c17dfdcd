"""Weights that are replaced while an engine runs: blocks of the old ones are never found again.

vLLM replaces weights by calls to its workers, resets its caches on request, and keeps the files of
a tier, whose folder is named after the weights. So the workers describe their weights again before
the first use of the tiers that follows such a call. If they are others and the caches were reset,
with nothing run since, the tiers go on in the folder of the new ones. Else blocks of the old ones
may be in the caches: nothing is stored or found until vLLM has reset them, the connector's too.

vLLM resets the prefix cache alone unless it is asked for the connector's too, and would then load
blocks of the old weights from a primary tier. So the first reset after a call by a name of vLLM's
for replacing weights is of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvpatch import state
from kvpatch.logs import log
from kvpatch.patch import argument


@dataclass
class Weights:
    """What an engine's tiers know of its weights; kept on the ``EngineCore`` and each tier."""

    describe: Callable[[], str]  # returns the fingerprint of the weights as they are
    described: str  # the fingerprint that the tiers' folders are named after
    touched: bool = False  # a call to the workers may have replaced the weights
    used: bool = False  # blocks may have been computed since the caches were reset
    suspended: bool = False  # the caches may hold blocks of other weights than ``described``
    renamed: list[Callable[[str], None]] = field(default_factory=list)  # told each new one

    def usable(self) -> bool:
        """Whether tiers may be used, for blocks of the weights as they are."""
        if self.touched and not self.suspended:
            self.touched = False
            now = self.describe()
            if now != self.described:
                self._replaced(now)
        self.used = True
        return not self.suspended

    def _replaced(self, now: str) -> None:
        if self.used:
            self.suspended = True
            log.warning(
                "the model's weights were replaced while vLLM's caches hold blocks of the old "
                "ones; secondary tiers are not used until the caches are reset with "
                "reset_connector=True"
            )
            return
        try:
            for rename in self.renamed:
                rename(now)
        except OSError as error:
            self.suspended = True
            log.warning("secondary tiers are not used with the new weights: %s", error)
            return
        self.described = now

    def reset(self) -> None:
        """No cache holds a block any more."""
        self.used = False
        self.touched |= self.suspended
        self.suspended = False


@dataclass
class Calls:
    """Whether weights may have been replaced since all caches were reset; on the ``EngineCore``."""

    unanswered: bool = False


def around_call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Take the weights for replaced by any call to the workers from outside."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        if _replaces(args, kwargs):
            state.of(instance, Calls).unanswered = True
        weights = state.find(instance, Weights)
        if weights is not None:
            weights.touched = True


def _replaces(args: Any, kwargs: Any) -> bool:
    """Whether a worker's method is one such as ``reload_weights`` or ``finish_weight_update``.

    Functions of an operator's are many things, and seldom that: they may cost no tier its blocks.
    """
    method = args[0] if args else kwargs.get("method")
    return isinstance(method, str) and "weight" in method


def around_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Reset all caches after weights may have been replaced, and note when all were reset."""
    calls = state.of(instance, Calls)
    given = len(args) > 1 or "reset_connector" in kwargs
    whole = given and bool(argument(args, kwargs, 1, "reset_connector"))
    if calls.unanswered and not whole:
        args, kwargs, whole = args[:1], {**kwargs, "reset_connector": True}, True
    done = wrapped(*args, **kwargs)
    if done and whole:
        calls.unanswered = False
        weights = state.find(instance, Weights)
        if weights is not None:
            weights.reset()
    return done


def usable(tiers: Iterable[Any]) -> bool:
    """Whether all ``tiers`` may be used; those without ``weights`` always may."""
    known = (getattr(tier, "weights", None) for tier in tiers)
    return all(weights.usable() for weights in known if weights is not None)
