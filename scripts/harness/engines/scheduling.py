"""Asynchronous scheduling on a CPU, where vLLM turns it off; on a GPU it is the default."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from harness.engines.inside import RELEASE


def allow_async_scheduling() -> None:
    """Let async scheduling through, which vLLM's CPU platform always turns off."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keeping(cls: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(keeping)


def copy_outputs_without_streams(core: Any) -> None:
    """Let outputs be copied in async scheduling, which no CPU did before 0.26.

    A copy there is done when it was asked for: what stands for a stream and an event of a
    GPU need not wait.
    """
    runner = core.model_executor.driver_worker.worker.model_runner
    stream = getattr(runner, "async_output_copy_stream", None)  # Runner V2 has none
    if stream is not None and not hasattr(stream, "wait_stream"):
        stream.wait_stream = lambda other: None
    if Version("0.24") > RELEASE:
        torch.cuda.current_stream = lambda device=None: None
        torch.cuda.stream = nullcontext
        torch.Event = lambda *args, **kwargs: SimpleNamespace(
            record=lambda *at: None, synchronize=lambda: None
        )
