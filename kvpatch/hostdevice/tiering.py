"""vLLM's tiers on the host device, through vLLM's plug-in interface for specs.

Configured as ``spec_name=HostTieringOffloadingSpec`` with
``spec_module_path=kvpatch.hostdevice.tiering`` in ``kv_connector_extra_config``. The
manager, the tiers and the shared memory are those of vLLM's ``TieringOffloadingSpec``;
only the copies between the device and that memory are the host device's.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvpatch.hostdevice.offloading import HostOffloadingSpec, HostOffloadingWorker
from kvpatch.upstream.vllm_api import blocks_per_chunk, chunks_of


class HostTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering spec with the host device's copies."""

    def get_worker(self, kv_caches: Any) -> Any:
        """Return the worker that copies ``kv_caches``; called once per worker process."""
        made: HostOffloadingWorker | None = getattr(self, "_worker", None)
        if made is None:
            rows = chunks_of(self)
            made = HostOffloadingWorker(
                kv_caches,
                blocks_per_chunk(self),
                rows,
                SharedOffloadRegion(*self._place(rows)),  # its parameters were renamed too
            )
        self._worker: Any = made
        return made

    def _place(self, rows: int) -> tuple[Any, ...]:
        """Return the arguments that place this worker's part of the CPU tier, by release."""
        size = self.cpu_page_size_per_worker
        if hasattr(self, "config"):
            rank = self.config.parallel.rank
            return self.config.engine_id, rows, rank, self.kv_bytes_per_chunk, size
        name, parallel = self.vllm_config.instance_id, self.vllm_config.parallel_config
        if hasattr(self, "kv_bytes_per_offloaded_block"):  # 0.24
            return name, rows, parallel.rank, self.kv_bytes_per_offloaded_block, size
        workers = parallel.world_size
        return name, size * workers * rows, rows, parallel.rank, workers, size

    get_handlers = HostOffloadingSpec.get_handlers
