"""vLLM's ``CPUOffloadingSpec`` by the name that configurations for the host device have.

With kvpatch on, vLLM's own spec runs on the host device, and this one is no different. In a
process where kvpatch is off, importing it makes vLLM's copying workers run here, so that
offloading from static memory can be compared.

Configured as ``spec_name=HostOffloadingSpec`` with
``spec_module_path=kvpatch.hostdevice.offloading`` in ``kv_connector_extra_config``.
"""

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
