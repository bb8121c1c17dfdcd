"""The bytes of every block that comes back, on every rank, inside an engine's process."""

from collections.abc import Callable, Iterable
from typing import Any

from harness.engines.inside import after, digest, group_of, layers_of


def digests(worker: Any, blocks: list[tuple[int, int]]) -> list[str]:
    """Digest (group, block) pairs through the model's KV tensors; runs in a worker."""
    layers = layers_of(worker.model_runner)
    return [digest(layers[group], block) for group, block in blocks]


def _blocks_of_jobs(meta: Any) -> list[int]:
    """The device blocks that OffloadingConnector loads into."""
    jobs = meta.load_jobs.values()
    return [block for job in jobs for block in job.dst_spec.block_ids.tolist()]


class BlockWatch:
    """Digests each cached block through the model's KV tensors, by block hash, on every rank.

    A hash that turns up again in another place was restored or computed again; the
    first digests are what it must still have if it was restored. Where blocks are lost, and
    computed again beside other tokens, the connector says which were restored:
    SimpleCPUOffloadConnector in lazy mode, and a tier that had no memory for what a disk behind it
    had. Such a block must have the digests of one of the times that it was computed.

    Args:
        core: the engine's core.
        loses: whether an OffloadingConnector's blocks may be lost.
    """

    def __init__(self, core: Any, loses: bool = False) -> None:
        # Not through the engine, to which a call to its workers may mean other weights.
        self.executor = core.model_executor
        self.pool = core.scheduler.kv_cache_manager.block_pool
        self.requests = core.scheduler.requests
        self.tokens = core.vllm_config.cache_config.block_size
        transfer = core.vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config if transfer is not None else {}
        self.chunk = extra.get("block_size", self.tokens) // self.tokens
        drafting = core.vllm_config.speculative_config
        # Earlier releases have no drafts from states that go without the last block.
        drops = drafting and getattr(drafting, "needs_eagle_block_drop", drafting.use_eagle)
        self.computes_last = bool(drops and drops())
        self.last: set[bytes] = set()
        self.seen: dict[bytes, set[tuple[str, ...]]] = {}
        self.places: dict[bytes, int] = {}
        self.returned = 0
        self.changed: list[int] = []
        self.loads: set[int] | None = None  # device blocks; None if nobody says which
        one = core.scheduler.connector
        for connector in getattr(one, "_connectors", [one]):  # those inside of MultiConnector
            if hasattr(connector, "scheduler_manager"):
                self._note_loads(connector.scheduler_manager, lambda meta: meta.load_gpu_blocks)
            elif loses and hasattr(connector, "connector_scheduler"):
                self._note_loads(connector.connector_scheduler, _blocks_of_jobs)

    def _note_loads(self, planner: Any, blocks_of: Callable[[Any], Iterable[int]]) -> None:
        loads = self.loads = set() if self.loads is None else self.loads
        after(planner, "build_connector_meta", lambda meta, *args: loads.update(blocks_of(meta)))

    def after_step(self) -> None:
        if self.computes_last:
            self.note_last()
        new = {
            block.block_hash: block.block_id
            for block in self.pool.kv_block_pool
            if block.block_hash is not None
            and self.places.get(block.block_hash) != block.block_id
            and block.block_hash[:-4] not in self.last  # without its group
        }
        if new:
            wanted = [(group_of(key), block) for key, block in new.items()]
            ranks = self.executor.collective_rpc(digests, args=(wanted,))
            for (key, block), *found in zip(new.items(), *ranks, strict=True):
                known = self.seen.setdefault(key, set())
                if known and (self.loads is None or block in self.loads):
                    self.returned += 1
                    if tuple(found) not in known:
                        self.changed.append(block)
                else:
                    known.add(tuple(found))
            if self.loads is not None:
                self.loads -= set(new.values())
        self.places |= new
        here = {block.block_hash for block in self.pool.kv_block_pool}
        self.places = {key: place for key, place in self.places.items() if key in here}

    def note_last(self) -> None:
        """Note the last whole block of each prompt: with EAGLE it is computed again after a hit.

        Beside other tokens, and so with other last digits; with it all blocks of its chunk.
        """
        for request in self.requests.values():
            whole = request.num_prompt_tokens // self.tokens
            if 0 < whole <= len(request.block_hashes):
                kept = (whole - 1) // self.chunk * self.chunk
                self.last.update(request.block_hashes[kept:whole])
