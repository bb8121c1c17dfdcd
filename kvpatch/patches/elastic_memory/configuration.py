"""Checking a configuration once vLLM has resolved it, and the frontend's status line."""

from __future__ import annotations

from typing import Any

from kvpatch import rules
from kvpatch.patches.elastic_memory import lifting
from kvpatch.status import record
from kvpatch.upstream import kvcached_api
from kvpatch.upstream.vllm_api import device_type
from kvpatch.versions import Facts


def around_post_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Check a configuration against the rules of every feature; the first that it breaks refuses.

    In the frontend, before any engine is started: the refusal is the last line of output.
    """
    result = wrapped(*args, **kwargs)
    if instance.model_config is not None:
        facts = facts_of_engine()
        lifting.decide(instance, facts)
        refusal = rules.check(instance, facts, rules.of(record.rules), record.skipped)
        if refusal is not None:
            raise refusal
        announce_frontend()
    return result


def facts_of_engine() -> Facts:
    """Return the facts of this process, with those that require vllm."""
    assert record.facts is not None
    return record.facts._replace(
        device=device_type(),
        contiguous=kvcached_api.contiguous(record.facts.environment),
    )


def announce_frontend() -> None:
    """Log the status line of a process whose engine runs in another process."""
    from vllm import envs

    in_engine = record.said_here() and "frontend" not in record.roles
    if envs.VLLM_ENABLE_V1_MULTIPROCESSING and not in_engine:
        record.roles = ["frontend"]
        record.say()
