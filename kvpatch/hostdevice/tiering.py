"""vLLM's ``TieringOffloadingSpec``, as ``HostTieringOffloadingSpec``, as in ``offloading``."""

from __future__ import annotations

from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvpatch.hostdevice import offloading

offloading.prepare()


class HostTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering spec."""
