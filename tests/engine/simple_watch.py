"""What SimpleCPUOffloadConnector does in this process, counted at its seams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any


class SimpleWatch:
    """Counts copies, blocks of the CPU tier, and what taking them does to the device.

    Attributes:
        stored, loaded: blocks whose copy was submitted.
        twice: copies that were submitted again, by event; and blocks that were stored
            while the tier had them, or another copy of them was under way.
        evicted: blocks that the CPU tier gave up.
        device_calls: what kvcached's pages were asked for while a CPU block was taken or
            freed.
        tier_calls: how often a CPU block was taken or freed.
    """

    def __init__(self, core: Any) -> None:
        self.planner = core.scheduler.connector.scheduler_manager
        self.device = core.scheduler.kv_cache_manager.block_pool
        self.stored = self.loaded = self.evicted = self.tier_calls = 0
        self.twice: list[str] = []
        self.device_calls: Counter[str] = Counter()
        self._inside = 0
        self._events: set[tuple[bool, int]] = set()
        self._watch_copies()
        self._watch_tier()

    def _watch_copies(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        backend = get_kv_transfer_group().worker_handler._backend
        launch = backend.launch_copy

        def launch_copy(
            source: Any, target: Any, is_store: bool, event_idx: int, **more: Any
        ) -> None:
            if (is_store, event_idx) in self._events:
                self.twice.append(f"event {event_idx}")
            self._events.add((is_store, event_idx))
            if is_store:
                self.stored += len(source)
            else:
                self.loaded += len(source)
            launch(source, target, is_store=is_store, event_idx=event_idx, **more)

        backend.launch_copy = launch_copy
        build = self.planner.build_connector_meta

        def build_connector_meta(output: Any) -> Any:
            before = dict(self.planner._store_event_to_blocks)
            meta = build(output)
            known = self._hashes(before.values())
            for block in self._hashes(
                transfer
                for event, transfer in self.planner._store_event_to_blocks.items()
                if event not in before
            ):
                tier = self.planner.cpu_block_pool.cached_block_hash_to_block
                if block in known or tier.get_one_block(block) is not None:
                    self.twice.append(f"block {block.hex()}")
                known.append(block)
            return meta

        self.planner.build_connector_meta = build_connector_meta

    def _hashes(self, transfers: Any) -> list[bytes]:
        blocks = self.planner.cpu_block_pool.blocks
        return [blocks[i].block_hash for transfer in transfers for i in transfer.cpu_block_ids]

    def _watch_tier(self) -> None:
        pool = self.planner.cpu_block_pool

        def inside(function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                self.tier_calls += 1
                self._inside += 1
                try:
                    return function(*args, **kwargs)
                finally:
                    self._inside -= 1

            return counted

        for name in ("get_new_blocks", "free_blocks", "touch", "reset_prefix_cache"):
            setattr(pool, name, inside(getattr(pool, name)))
        for name in ("alloc", "free"):
            self._count_device(self.device.kv_cache_manager, name)
        evict = pool._maybe_evict_cached_block

        def counted_evict(block: Any) -> bool:
            evicted = evict(block)
            self.evicted += evicted
            return bool(evicted)

        pool._maybe_evict_cached_block = counted_evict

    def _count_device(self, manager: Any, name: str) -> None:
        function = getattr(manager, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                self.device_calls[name] += 1
            return function(*args, **kwargs)

        setattr(manager, name, counted)

    def result(self) -> dict[str, Any]:
        return {
            "stored": self.stored,
            "loaded": self.loaded,
            "twice": self.twice,
            "evicted": self.evicted,
            "device_calls": dict(self.device_calls),
            "tier_calls": self.tier_calls,
            "tier_blocks": self.planner.num_cpu_blocks,
            "pinned": sum(
                block.ref_cnt > 0 and not block.is_null
                for pool in (self.planner.cpu_block_pool, self.device)
                for block in pool.blocks
            ),
        }
