"""Setting the first limit, when an engine has memory and before it has requests."""

from __future__ import annotations

from typing import Any

from kvpatch import environ
from kvpatch.environ import FIRST_LIMIT
from kvpatch.logs import log
from kvpatch.refusal import Refusal
from kvpatch.sizes import readable
from kvpatch.upstream import kvcached_api, requests


def around_engine_start(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Limit an engine that has just started; refused if a longest request would not fit."""
    wrapped(*args, **kwargs)
    manager = kvcached_api.manager_of(instance)
    most = kvcached_api.most(manager)
    size = environ.share(FIRST_LIMIT.read()).of(most)
    longest = requests.longest(instance)  # no more than all: KVP425
    if size < longest:
        tokens = instance.vllm_config.model_config.max_model_len
        raise Refusal(
            f"{FIRST_LIMIT} is {FIRST_LIMIT.read()}, which is {readable(size)} of this engine's KV "
            f"cache, and a request of {tokens} tokens needs {readable(longest)}",
            "such a request would wait for ever",
            f"set {FIRST_LIMIT} to {readable(longest)} or more, or a smaller --max-model-len",
            code="KVP424",
        )
    if size < most:
        kvcached_api.set_limit(manager, size)
        log.info(
            "kvpatch: the first limit of the pool %s is %s of %s",
            manager.ipc_name,
            readable(size),
            readable(most),
        )
