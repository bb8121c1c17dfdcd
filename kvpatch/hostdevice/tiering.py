"""vLLM's ``TieringOffloadingSpec`` by the name that configurations for the host device have.

Configured as ``spec_name=HostTieringOffloadingSpec`` with
``spec_module_path=kvpatch.hostdevice.tiering`` in ``kv_connector_extra_config``; see
``offloading``.
"""

from __future__ import annotations

from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvpatch.hostdevice import offloading

offloading.prepare()


class HostTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering spec."""
