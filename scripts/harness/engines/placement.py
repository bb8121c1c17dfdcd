"""Where vLLM's engines and workers run: on a CPU as it has them on a GPU.

On a CPU vLLM starts an engine and each worker as a fresh Python, which takes half a minute, and
gives one worker a process of its own too. On a GPU they are forks, and one worker is in its
engine's process.
"""

import os
import time
from typing import Any

PAUSE = 0.0003  # seconds, little beside a step of an engine


def stay_in_this_process() -> None:
    """Let one worker be where it is asked to be, which is in its engine's process by default.

    vLLM gives it a process of its own on a CPU: up to 0.23 whatever is asked for, and later where
    its engine has one. Several engines of one server always ask for that.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def unmoved(cls: Any, config: Any) -> None:
        asked = config.parallel_config.distributed_executor_backend
        check(config)
        if config.parallel_config.world_size == 1:
            config.parallel_config.distributed_executor_backend = asked

    CpuPlatform.check_and_update_config = classmethod(unmoved)


def fork_workers() -> None:
    """Let vLLM fork its engines and workers, which then leave each other the processors."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def forked(cls: Any, config: Any) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(forked)
    wait_without_spinning()


def wait_without_spinning() -> None:
    """Let a process sleep between two looks at vLLM's queues in shared memory.

    It looks without a pause for a second after each message, which takes the processor that the
    writer of the next one needs where there is none to spare.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(PAUSE)
