"""Releases that are refused for a fault of their own, and the release that has it fixed.

What fixed a fault is a target, or a parameter of one, that the release does not have;
tests look it up in the recorded shapes of every release.
"""

from __future__ import annotations

from dataclasses import dataclass

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


@dataclass(frozen=True)
class Fault:
    """One fault of vLLM with offloading on kvcached's memory.

    Attributes:
        vllm: PEP 440 range of the releases that have it.
        what: the fault, as the reason of a refusal.
        upstream: where it was found or mended.
        fixed: the first release without it.
        target: what mended it; empty where it was a requirement.
        parameter: the parameter of ``target`` that mended it; empty for the whole target.
    """

    vllm: str
    what: str
    upstream: str
    fixed: str
    target: str = ""
    parameter: str = ""

    @property
    def why(self) -> str:
        """The reason, and the release that does not have it."""
        return f"{self.what} ({self.upstream}), as it no longer does from {self.fixed} on"


# The first that holds is the reason.
FAULTS = (
    Fault(
        vllm=">=0.12,<0.14",
        what="its OffloadingConnector gives the blocks of a preempted request away while they "
        "are still being stored",
        upstream="vllm-project/vllm#29870",
        fixed="0.14.0",
        target=f"{_V1}.offloading_connector:OffloadingConnector.handle_preemptions",
    ),
    Fault(
        vllm=">=0.14,<0.15",
        what="it requires torch 2.9, and kvcached 0.1.6 does not run before torch 2.10",
        upstream="ovg-project/kvcached, setup.py in 0.1.6",
        fixed="0.15.0",
    ),
    Fault(
        vllm=">=0.15,<0.16",
        what="it frees the blocks of an aborted request while they are still being loaded",
        upstream="vllm-project/vllm, Scheduler.finish_requests in 0.16",
        fixed="0.16.0",
        target="vllm.v1.core.sched.scheduler:Scheduler._free_request",
        parameter="delay_free_blocks",
    ),
)
