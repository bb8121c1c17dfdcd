"""vLLM's ``TieringOffloadingSpec`` by the name of the host device's configurations.

Configured as ``spec_name=HostTieringOffloadingSpec``, as in ``offloading``.
"""

from __future__ import annotations

from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvpatch.hostdevice import offloading

offloading.prepare()


class HostTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering spec."""
