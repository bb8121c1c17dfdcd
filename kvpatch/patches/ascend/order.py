"""Stores of vllm-ascend's copy backend wait for the computation before them."""

from __future__ import annotations

from typing import Any

from kvpatch.patch import argument

_WAIT_EVENT = 5  # its position, without self


def around_launch(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Give a store the event of the computation that vLLM 0.23 does not pass.

    It is recorded in the thread that launched the computation; another one launches the copy later.
    """
    passed = args[_WAIT_EVENT] if len(args) > _WAIT_EVENT else kwargs.get("wait_event")
    if not argument(args, kwargs, 2, "is_store") or passed is not None:
        wrapped(*args, **kwargs)
        return
    import torch

    computed = torch.npu.Event()
    computed.record(torch.npu.current_stream())
    wrapped(*args[:_WAIT_EVENT], **{**kwargs, "wait_event": computed})
