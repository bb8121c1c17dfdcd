"""The releases of vLLM and kvcached: inspected and validated.

Inspected: the release's sources were checked against every row of ``kvpatch.patches``, and
its signatures are recorded in ``docs/results/matrix/signatures``. Validated: it has also passed the
full engine test matrix, and may start. Each patch release is validated separately.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

from packaging.version import Version

from kvpatch.versions import Installed, Span, in_words, parsed

VALIDATED, INSPECTED_ONLY = "validated", "inspected"

RELEASES = {
    "0.12.0": INSPECTED_ONLY,
    "0.13.0": INSPECTED_ONLY,
    "0.14.0": INSPECTED_ONLY,
    "0.14.1": INSPECTED_ONLY,
    "0.15.0": INSPECTED_ONLY,
    "0.15.1": INSPECTED_ONLY,
    "0.16.0": VALIDATED,
    "0.17.0": VALIDATED,
    "0.17.1": VALIDATED,
    "0.18.0": VALIDATED,
    "0.18.1": VALIDATED,
    "0.19.0": VALIDATED,
    "0.19.1": VALIDATED,
    "0.20.0": VALIDATED,
    "0.20.1": VALIDATED,
    "0.20.2": VALIDATED,
    "0.21.0": VALIDATED,
    "0.22.0": VALIDATED,
    "0.22.1": VALIDATED,
    "0.23.0": VALIDATED,
    "0.24.0": VALIDATED,
    "0.25.0": VALIDATED,
    "0.25.1": VALIDATED,
    "0.26.0": VALIDATED,
    "0.27.0": VALIDATED,
    "0.27.1": VALIDATED,
    "0.28.0": VALIDATED,
    "0.29.0": VALIDATED,
    "0.30.0": VALIDATED,
    "0.31.0": VALIDATED,
    "0.32.0": VALIDATED,
    "0.33.0": VALIDATED,
}
INSPECTED = list(RELEASES)[-1]  # the newest one
FLOOR = "0.16"  # older releases have a known fault, see FAULTS
KVCACHED = ("0.1.6",)
# vllm-ascend, by release the vLLM that it is built for; its memory and copies are inspected.
VLLM_ASCEND = {"0.23.0": "0.23.0"}
# The sdists that may be built for a device without a wheel of kvcached, with their hashes.
KVCACHED_SDISTS = {"0.1.6": "4a1a428244b5e3667841e28f03a4a20be7066a21a856b2deaef727e18f845068"}

# Where fp8 KV caches were compared with plain vLLM's. Asked in the frontend, and in the worker,
# whose layers have the last word on the dtype.
FP8 = Span("0.21")

_SINCE_FLOOR = Span(FLOOR)
_RANGE = 3  # so many releases are shorter as a range


def validated(span: Span = _SINCE_FLOOR) -> list[str]:
    """Return the validated releases of a span, oldest first."""
    return [
        release
        for release, status in RELEASES.items()
        if status is VALIDATED and parsed(release) in span
    ]


def is_validated(vllm: Installed, span: Span = _SINCE_FLOOR) -> bool:
    """Return whether an installed vLLM is a validated release of a span."""
    return vllm.is_one_of(validated(span))


def nearest(vllm: Installed) -> str:
    """Return the newest validated release that is not newer than ``vllm``, else the oldest.

    For a version without a number it is the newest.
    """
    # ``release_of`` leaves out what makes 0.28.0rc1 older than 0.28.0.
    oldest, *later = validated()
    release = release_of(vllm)
    older = [one for one in later if parsed(one) <= release]
    return older[-1] if older else oldest


def in_ranges(releases: Collection[str]) -> str:
    """Return releases of vLLM in words: ``0.16.0, 0.19.1 to 0.28.0 or 0.30.0``.

    Three and more, between which no other release is known, are one range. Twenty-six names one
    after the other are no sentence that an operator reads to its end.

    Args:
        releases: names in ``RELEASES``.
    """
    runs = (list(run) for named, run in groupby(RELEASES, set(releases).__contains__) if named)
    return in_words(
        part for run in runs for part in (run if len(run) < _RANGE else [f"{run[0]} to {run[-1]}"])
    )


def release_of(vllm: Installed) -> Version:
    """Return the inspected release whose rows apply to ``vllm``.

    That is its own release number; for a later release, or a version without a number, the
    newest inspected release.
    """
    newest = parsed(INSPECTED)
    return newest if vllm.version is None else min(newest, parsed(vllm.version.base_version))


_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class Fault(NamedTuple):
    """One fault of vLLM with offloading on kvcached's memory.

    Attributes:
        span: the releases that have it.
        what: the fault, as the reason of a refusal.
        upstream: where it was reported or fixed.
        fixed: the first release without it.
        target: the object that fixed it; empty if the fault is a requirement.
        parameter: the parameter of ``target`` that fixed it; empty for the whole target.
    """

    span: Span
    what: str
    upstream: str
    fixed: str
    target: str = ""
    parameter: str = ""

    @property
    def why(self) -> str:
        """The reason, and the release that fixed it."""
        return f"{self.what} ({self.upstream}, fixed in {self.fixed})"


# Releases that are refused for a known fault; the first match is the reason.
# Tests look up each fix in the recorded signatures of every release.
FAULTS = (
    Fault(
        span=Span("0", "0.14"),
        what="its OffloadingConnector frees the blocks of a preempted request while they are "
        "still being stored",
        upstream="vllm-project/vllm#29870",
        fixed="0.14.0",
        target=f"{_V1}.offloading_connector:OffloadingConnector.handle_preemptions",
    ),
    Fault(
        span=Span("0.14", "0.15"),
        what="it requires torch 2.9, and kvcached 0.1.6 requires torch 2.10",
        upstream="ovg-project/kvcached, setup.py in 0.1.6",
        fixed="0.15.0",
    ),
    Fault(
        span=Span("0.15", FLOOR),
        what="it frees the blocks of an aborted request while they are still being loaded",
        upstream="vllm-project/vllm, Scheduler.finish_requests in 0.16",
        fixed="0.16.0",
        target="vllm.v1.core.sched.scheduler:Scheduler._free_request",
        parameter="delay_free_blocks",
    ),
)


def fault_of(vllm: Installed) -> Fault | None:
    """Return the fault for which a vLLM is refused, or None."""
    release = release_of(vllm)
    return next((fault for fault in FAULTS if release in fault.span), None)
