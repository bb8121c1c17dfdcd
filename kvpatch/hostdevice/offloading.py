"""vLLM's ``CPUOffloadingSpec``, as ``HostOffloadingSpec``; its import suffices without kvpatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpatch import versions
from kvpatch.hostdevice import copies
from kvpatch.patch import Transaction, load
from kvpatch.supported import release_of
from kvpatch.upstream.vllm_api import find

if TYPE_CHECKING:
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
else:
    CPUOffloadingSpec = find("CPUOffloadingSpec")


def prepare() -> None:
    """Apply the rows for copies, unless kvpatch has."""
    rows = load("kvpatch.patches.host_copies:FEATURE").at(release_of(versions.installed("vllm")[0]))
    if not copies.in_force(load(rows[0].target)):
        Transaction().apply_all(rows)


prepare()


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPU offloading spec."""
