"""A scheduler class of an operator's own: what no table calls validated, and is right."""

from vllm.v1.core.sched.scheduler import Scheduler


class OwnScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's, under another name."""
