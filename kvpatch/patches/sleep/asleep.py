"""An engine falls asleep and wakes up; everything here runs on its own thread.

A sleep of level 1 is a suspension, and then vLLM's own sleep: blocks that only the device has are
stored, the limit goes to the floor, and the connector keeps its cache, because the weights come
back as they were. A sleep of level 2 drops the weights, and vLLM resets all caches.

Where weights are replaced after a sleep that kept the connector's cache, vLLM's caches would be
empty, and so nobody resets them again. They are reset here, before the next request.

``release_kv_cache_memory`` drops all caches, as in vLLM, and is a suspension with nothing to store:
vLLM asks its own allocator for the pages, which has none of kvcached's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpatch import state
from kvpatch.logs import log
from kvpatch.patch import argument
from kvpatch.patches.secondary_tiers.weights import Calls
from kvpatch.patches.suspend.suspension import ON_THE_WAY, Phase, Suspension

_KEEPS = 1  # the level in which the same weights come back
_LOST = "what only the device has is lost in this sleep"
_STAYS = "release_kv_cache_memory has dropped the caches, and kvcached's pages stay mapped"


@dataclass
class Asleep:
    """Kept on the ``EngineCore``."""

    pending: Future[None] | None = None  # what the client waits for while blocks are stored
    sleep: Callable[[], Any] | None = None  # vLLM's own, as it was asked for, to call after that
    otherwise: str = ""  # what it is without a suspension, for a warning
    suspended: bool = False  # for a sleep, until the engine wakes up
    keeps: bool = False  # the next reset of all caches is a sleep's that leaves the connector's
    kept: bool = False  # the connector has blocks from before a sleep, and vLLM none
    touched: bool = False  # its workers were called while it slept, and may have other weights


def around_sleep(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Suspend the engine before a sleep of level 1; return what vLLM's does, or a future of it."""
    level = argument(args, kwargs, 0, "level") if args or "level" in kwargs else _KEEPS
    mode = argument(args, kwargs, 1, "mode") if len(args) > 1 or "mode" in kwargs else "abort"
    suspension = state.find(instance, Suspension)
    asleep = state.of(instance, Asleep)
    if level != _KEEPS:
        return wrapped(*args, **kwargs)
    if asleep.pending is not None:
        return asleep.pending
    sleep = partial(_fall_asleep, asleep, partial(wrapped, *args, **kwargs))
    if suspension is None or instance.model_executor.is_sleeping:
        return sleep()
    if why_not := suspension.why_not():
        log.warning("kvpatch: %s: %s", _LOST, why_not)
        return sleep()
    # Where running requests may finish, a suspension waits for them as well.
    begin = partial(suspension.suspend, finish=mode == "wait", whole=False, timeout=None)
    return _suspend(asleep, suspension, begin, sleep, _LOST)


def around_release(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Give the pages of an engine back whose caches were dropped; returns as ``around_sleep``."""
    wrapped(*args, **kwargs)
    suspension = state.find(instance, Suspension)
    if suspension is None:
        log.warning(
            "kvpatch: %s: the engine is in the caller's process, where nothing steps it", _STAYS
        )
        return None
    return _suspend(
        state.of(instance, Asleep), suspension, suspension.release, lambda: None, _STAYS
    )


def _suspend(
    asleep: Asleep,
    suspension: Suspension,
    begin: Callable[[], None],
    sleep: Callable[[], Any],
    otherwise: str,
) -> Future[None]:
    """Suspend an engine until it wakes up; return a future of its falling asleep then."""
    pending: Future[None] = Future()
    begins = suspension.phase not in (*ON_THE_WAY, Phase.SUSPENDED)
    begin()
    asleep.suspended = begins
    asleep.pending, asleep.sleep, asleep.otherwise = pending, sleep, otherwise
    _advance(asleep, suspension)
    return pending


def after_engine_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Fall asleep once the engine is suspended. Wraps ``EngineCoreProc._process_engine_step``."""
    result = wrapped(*args, **kwargs)
    asleep = state.find(instance, Asleep)
    suspension = state.find(instance, Suspension)
    if asleep is not None and suspension is not None:
        _advance(asleep, suspension)
    return result


def _advance(asleep: Asleep, suspension: Suspension) -> None:
    """Fall asleep, if that was asked for and the suspension has ended, well or not."""
    pending, sleep = asleep.pending, asleep.sleep
    if pending is None or sleep is None or suspension.phase in (*ON_THE_WAY, Phase.RESUMING):
        return
    asleep.pending = asleep.sleep = None
    if suspension.phase is Phase.RUNS:
        asleep.suspended = False
        why = suspension.said.get("error") or suspension.given_up
        log.warning("kvpatch: %s: %s", asleep.otherwise, why)
    try:
        done = sleep()
    except Exception as error:
        _stays_awake(asleep, suspension)
        pending.set_exception(error)
        return
    if done is None:
        pending.set_result(None)
    else:
        done.add_done_callback(lambda one: _tell(pending, one, asleep, suspension))


def _fall_asleep(asleep: Asleep, sleep: Callable[[], Any]) -> Any:
    asleep.keeps = True
    try:
        return sleep()
    except BaseException:
        asleep.keeps = False
        raise


def _tell(pending: Future[None], done: Future[Any], asleep: Asleep, suspension: Suspension) -> None:
    error = done.exception()
    if error is None:
        pending.set_result(None)
    else:
        _stays_awake(asleep, suspension)
        pending.set_exception(error)


def _stays_awake(asleep: Asleep, suspension: Suspension) -> None:
    asleep.keeps = False
    if asleep.suspended:
        asleep.suspended = False
        suspension.resume()


def around_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Leave the connector's cache in a sleep that keeps it.

    Where weights were replaced, ``secondary_tiers.reset_caches`` resets it all the same.
    """
    asleep = state.find(instance, Asleep)
    if asleep is None:
        return wrapped(*args, **kwargs)
    if asleep.keeps:
        asleep.keeps, asleep.kept = False, True
        return wrapped(*args[:1], **{**kwargs, "reset_connector": False})
    done = wrapped(*args, **kwargs)
    asleep.kept = asleep.touched = False
    return done


def around_call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Reset all caches where the weights of what a sleep kept were replaced.

    While it sleeps, any call from outside is taken for that; what it kept goes once it is awake.
    """
    asleep = state.find(instance, Asleep)
    try:
        return wrapped(*args, **kwargs)
    finally:
        if asleep is not None and asleep.kept:
            asleep.touched |= instance.model_executor.is_sleeping
            _forget(instance, asleep)


def _forget(instance: Any, asleep: Asleep) -> None:
    """Reset all caches of an engine that is awake, if blocks of other weights may be in them."""
    replaced = asleep.touched or state.of(instance, Calls).unanswered
    if asleep.kept and replaced and not instance.model_executor.is_sleeping:
        log.warning(
            "kvpatch: the weights were replaced after a sleep of level 1: what the CPU tier has of "
            "the old ones is forgotten"
        )
        instance._reset_caches()


def around_wake_up(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Resume an engine that was suspended for its sleep, once everything is back."""
    awake = wrapped(*args, **kwargs)
    asleep = state.find(instance, Asleep)
    if awake and asleep is not None:
        _forget(instance, asleep)
    if awake and asleep is not None and asleep.suspended:
        suspension = state.find(instance, Suspension)
        assert suspension is not None
        pending, asleep.pending, asleep.sleep = asleep.pending, None, None
        _stays_awake(asleep, suspension)
        if pending is not None:
            pending.set_exception(RuntimeError("the engine was woken up before it slept"))
    return awake
