"""The hooks of suspension in vLLM's engine and scheduler."""

from __future__ import annotations

import time
from typing import Any

from kvpatch import state
from kvpatch.environ import IDLE, duration
from kvpatch.logs import log
from kvpatch.patch import argument
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.patches.suspend import rules
from kvpatch.patches.suspend.giving import Giving
from kvpatch.patches.suspend.hold import Hold
from kvpatch.patches.suspend.offloading import OffloadingTier
from kvpatch.patches.suspend.server import Server
from kvpatch.patches.suspend.simple import SimpleTier
from kvpatch.patches.suspend.spill import Spill, Tier
from kvpatch.patches.suspend.suspension import Phase, Suspension
from kvpatch.patches.suspend.watch import Watch
from kvpatch.status import record
from kvpatch.upstream import connectors, kvcached_api


def around_engine_start(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Let an engine that has a process, and so a thread for questions, of its own listen."""
    wrapped(*args, **kwargs)
    if not hasattr(instance, "input_queue"):
        return
    from kvcached.utils import DEFAULT_IPC_NAME

    suspension = make(instance)
    giving = state.find(instance, Giving)
    if giving is not None:
        state.attach(instance, Watch(instance, giving, _idle_seconds()))
    try:
        state.attach(instance, Server(instance, suspension, DEFAULT_IPC_NAME))
    except OSError as error:
        log.warning(
            "kvpatch: kvpatch suspend, resume and limit cannot reach this engine: %s", error
        )


def _idle_seconds() -> float | None:
    text = IDLE.read()
    return duration(text) if text else None


def make(engine: Any) -> Suspension:
    """Attach the suspension of an engine, usable or not, and with a tier what gives pages back."""
    why_not = rules.why_not(engine.vllm_config, record.facts, record.lifted)
    connector = engine.scheduler.connector
    tier: Tier | None = None
    owner: Any = None
    if not why_not:
        if type(connector).__name__ == connectors.OFFLOADING:
            owner = connector.connector_scheduler
            tier = OffloadingTier(owner)
        else:
            owner = connector.scheduler_manager
            tier = SimpleTier(owner)
        why_not = tier.why_not()
    if tier is None or why_not:
        return state.attach(engine, Suspension(engine, None, why_not))
    spill = state.attach(owner, Spill(tier, kvcached_api.pool_of(engine)))
    suspension = state.attach(engine, Suspension(engine, spill))
    giving = Giving(engine, spill, lambda: suspension.phase is Phase.RUNS)
    manager = kvcached_api.manager_of(engine)
    state.attach(manager, state.attach(engine, giving))
    if (fenced := state.find(manager, Fenced)) is not None:
        wanted = state.of(engine.scheduler, Hold)
        fenced.asked.append(lambda: bool(wanted.stepped_for))
    return suspension


def before_engine_shutdown(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Close the socket of an engine. Wraps ``EngineCore.shutdown``."""
    server, watch = state.find(instance, Server), state.find(instance, Watch)
    if server is not None:
        server.close()
    if watch is not None:
        watch.close()
    return wrapped(*args, **kwargs)


def after_engine_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Go on with a suspension. Wraps ``EngineCoreProc._process_engine_step``."""
    result = wrapped(*args, **kwargs)
    suspension, giving = state.find(instance, Suspension), state.find(instance, Giving)
    if giving is not None:
        if result:  # a model ran
            giving.busy_at = time.monotonic()
        giving.advance()
    if suspension is not None:
        suspension.advance()  # it tells what the other has done
    return result


def around_has_requests(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep the engine stepping while a suspension needs it. Wraps ``Scheduler.has_requests``."""
    held = state.find(instance, Hold)
    return bool(wrapped(*args, **kwargs)) or (held is not None and bool(held.stepped_for))


def around_pause_state(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Set the stricter one of vLLM's pause state and ours, whatever vLLM is told."""
    wanted = argument(args, kwargs, 0, "pause_state")
    held = state.find(instance, Hold)
    if held is not None:
        held.vllms = wanted
        wanted = wanted if held.ours is None else max(wanted, held.ours)
    wrapped(wanted)
