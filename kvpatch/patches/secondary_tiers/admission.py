"""Admitting requests in an order in which none waits for memory behind the one that needs it.

A request whose blocks come from the CPU tier holds memory of the device while it waits.
vLLM stops at the first request it has no memory for. One that first had to wait for a
tier's answer, and then needs that memory, stands in front of those that hold it: vLLM
never looks at them again, and nothing runs any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpatch import state


@dataclass
class Step:
    """The step that is being scheduled, kept on the ``OffloadingConnectorScheduler``.

    Attributes:
        passed_over: a request was made to wait for a tier in it.
    """

    passed_over: bool = False


def around_matched_tokens(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Start no load behind a request that was told to wait in the same step.

    Wraps ``OffloadingConnectorScheduler.get_num_new_matched_tokens``, which answers with
    a number of tokens, or None to wait, and whether they are loaded meanwhile.
    """
    tokens, loads = wrapped(*args, **kwargs)
    if tokens is None:
        state.of(instance, Step).passed_over = True
    elif loads and state.of(instance, Step).passed_over:
        return None, False
    return tokens, loads


def around_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Begin a new step.

    Wraps ``OffloadingConnectorScheduler.build_connector_meta``, the last that a step
    asks of the connector.
    """
    state.of(instance, Step).passed_over = False
    return wrapped(*args, **kwargs)
