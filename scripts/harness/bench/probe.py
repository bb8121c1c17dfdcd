"""A worker extension that counts the copies that a transfer is made of.

Loaded through vLLM's ``--worker-extension-cls``; it changes nothing until ``count_copies``
is called over ``collective_rpc``.
"""

from __future__ import annotations

from typing import Any


class CopyCounter:
    """Counts blocks and copies of a host device's worker for OffloadingConnector."""

    def count_copies(self) -> bool:
        """Start counting; once per engine."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from harness.engines.inside import after
        from kvpatch.hostdevice import copies

        self.copied = {"blocks": 0, "copies": 0}
        connector: Any = get_kv_transfer_group()
        worker = connector.connector_worker.worker
        after(worker, "submit_store", self._stored)
        after(worker, "submit_load", self._loaded)
        after(copies, "_enqueue", self._enqueued)
        return True

    def copies(self) -> dict[str, int]:
        """Return what was counted so far."""
        return self.copied

    def _stored(self, result: Any, job_id: int, src_spec: Any, dst_spec: Any) -> None:
        self.copied["blocks"] += len(src_spec.block_ids)

    def _loaded(self, result: Any, job_id: int, src_spec: Any, dst_spec: Any, *more: Any) -> None:
        self.copied["blocks"] += len(dst_spec.block_ids)

    def _enqueued(self, result: Any, pairs: Any) -> None:
        self.copied["copies"] += len(pairs)
