"""A worker extension that checks restored bytes in the worker process itself.

Loaded through vLLM's ``--worker-extension-cls``; it changes nothing until
``watch_transfers`` is called over ``collective_rpc``.
"""

from typing import Any


class TransferProbe:
    """Digests blocks through the model's KV tensors when they are stored and loaded."""

    model_runner: Any  # of the worker that it is mixed into

    def watch_transfers(self) -> bool:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        # Only now: plain vLLM, which has the probe too, runs without kvpatch.
        import kvpatch
        from harness import provenance
        from harness.engines.inside import digest, layers_of

        provenance.check_installed(str(kvpatch.__file__))
        worker = get_kv_transfer_group().connector_worker.worker
        layers = layers_of(self.model_runner)
        self.stored: dict[tuple[int, int], str] = {}
        self.loads: dict[int, list[tuple[int, int, int]]] = {}
        self.outcome = {"stored": 0, "loaded": 0, "changed": 0}

        def places(device: Any, tier: Any) -> list[tuple[int, int, int]]:
            groups = [g for g, size in enumerate(device.group_sizes) for _ in range(size)]
            blocks, rows = map(int, device.block_ids), map(int, tier.block_ids)
            return list(zip(groups, blocks, rows, strict=True))

        submit_store, submit_load = worker.submit_store, worker.submit_load
        get_finished = worker.get_finished

        def on_store(job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            for group, block, row in places(src_spec, dst_spec):
                self.stored[group, row] = digest(layers[group], block)
                self.outcome["stored"] += 1
            return bool(submit_store(job_id, src_spec, dst_spec))

        def on_load(job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            self.loads[job_id] = places(dst_spec, src_spec)
            return bool(submit_load(job_id, src_spec, dst_spec))

        def on_finished() -> Any:
            results = get_finished()
            for result in results:
                for group, block, row in self.loads.pop(result.job_id, ()):
                    self.outcome["loaded"] += 1
                    if digest(layers[group], block) != self.stored[group, row]:
                        self.outcome["changed"] += 1
            return results

        worker.submit_store, worker.submit_load = on_store, on_load
        worker.get_finished = on_finished
        return True

    def transfer_outcome(self) -> dict[str, int]:
        return self.outcome
