"""A worker extension that counts the copies that a transfer is made of.

Loaded through vLLM's ``--worker-extension-cls``; it changes nothing until ``count_copies``
is called over ``collective_rpc``. It costs one addition per transfer.
"""

from __future__ import annotations

from typing import Any


class CopyCounter:
    """Counts blocks and copies of a host device's worker, of either connector."""

    def count_copies(self) -> bool:
        """Start counting; once per engine."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.copied = {"transfers": 0, "blocks": 0, "copies": 0}
        connector: Any = get_kv_transfer_group()
        if hasattr(connector, "connector_worker"):
            self._count_offloading(connector.connector_worker.worker)
        else:
            self._count_simple(connector.worker_handler._backend)
        return True

    def copies(self) -> dict[str, int]:
        """Return what was counted so far."""
        return self.copied

    def _add(self, blocks: int, copies: int) -> None:
        self.copied["transfers"] += 1
        self.copied["blocks"] += blocks
        self.copied["copies"] += copies

    def _count_offloading(self, worker: Any) -> None:
        from kvpatch.hostdevice import copies

        enqueue = copies._enqueue
        store, load = worker.submit_store, worker.submit_load

        def counted(copies: list[tuple[int, int, int]]) -> None:
            self.copied["copies"] += len(copies)
            enqueue(copies)

        def on_store(job_id: int, src_spec: Any, dst_spec: Any) -> Any:
            self._add(len(src_spec.block_ids), 0)
            return store(job_id, src_spec, dst_spec)

        def on_load(job_id: int, src_spec: Any, dst_spec: Any, *args: Any) -> Any:
            self._add(len(dst_spec.block_ids), 0)
            return load(job_id, src_spec, dst_spec, *args)

        copies._enqueue = counted
        worker.submit_store, worker.submit_load = on_store, on_load

    def _count_simple(self, backend: Any) -> None:
        launch = backend.launch_copy

        def counted(src_blocks: Any, *args: Any, **kwargs: Any) -> Any:
            self._add(len(src_blocks), len(src_blocks) * len(backend._pairs))
            return launch(src_blocks, *args, **kwargs)

        backend.launch_copy = counted
