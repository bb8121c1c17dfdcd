"""vLLM's tiers on the host device, through vLLM's own plug-in seam.

Configured as ``spec_name=HostTieringOffloadingSpec`` with
``spec_module_path=kvpatch.hostdevice.tiering`` in ``kv_connector_extra_config``. The
manager, the tiers and the shared memory are those of vLLM's ``TieringOffloadingSpec``;
only the copies between the device and that memory are the host device's.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvpatch.hostdevice.offloading import HostOffloadingWorker, tier_blocks


class HostTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering spec with the host device's copies."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker that copies ``kv_caches``; called once per worker process."""
        rows = tier_blocks(self)
        self._worker: Any = self._worker or HostOffloadingWorker(
            kv_caches,
            self.blocks_per_chunk,
            rows,
            SharedOffloadRegion(  # by position, because its parameters were renamed too
                self.config.engine_id,
                rows,
                self.config.parallel.rank,
                self.kv_bytes_per_chunk,
                self.cpu_page_size_per_worker,
            ),
        )
        return self._worker
