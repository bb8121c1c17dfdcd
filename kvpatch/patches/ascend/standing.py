"""Whether kvpatch's patches are in force when an engine on an NPU is about to serve.

vllm-ascend patches vLLM by assignments, some of them when an engine is configured or a worker
starts. One that undoes a patch of ours would raise no error.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpatch.patch import AppliedPatch, topmost
from kvpatch.refusal import Refusal
from kvpatch.status import record

# Engines have a subclass of it, whose module may have been imported before it was replaced.
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."


def check(scheduler: type) -> None:
    """Refuse an engine with this scheduler if a patch is not in force."""
    for lost in displaced(record.applied, scheduler):
        raise Refusal(
            f"the target of {lost.patch.id}, {lost.patch.target}, was replaced after it was "
            "patched",
            f"without it {lost.patch.why}",
            "remove the setting or the package that replaces it, or set KVPATCH=0",
            code="KVP204",
        )


def displaced(applied: Iterable[AppliedPatch], scheduler: type) -> list[AppliedPatch]:
    """Return the patches that are not reached any more, of each object the newest."""
    return [
        one
        for one in topmost(applied)
        if not one.stands()
        or (one.patch.target.startswith(_SCHEDULER) and not one.reached_from(scheduler))
    ]
