"""vLLM's scheduler, for ``--scheduler-cls``: an engine that asks for it has no fence.

vLLM imports it in the engine's own process, before kvcached asks for the fence there.
"""

from vllm.v1.core.sched.scheduler import Scheduler

from kvpatch import activation

assert activation.transaction.revert("fence.install")

__all__ = ["Scheduler"]
