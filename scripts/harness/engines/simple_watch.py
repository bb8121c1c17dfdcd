"""What SimpleCPUOffloadConnector does in this process, counted at its seams."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from harness.engines.inside import after, digest, group_of, layers_of, referenced, tell
from kvpatch.upstream import connectors


def simple_part(connector: Any) -> Any:
    """The SimpleCPUOffloadConnector in a connector, or None."""
    found = [part for part in connectors.parts(connector) if hasattr(part, "scheduler_manager")]
    return found[0] if found else None


NEVER = (0, "no digest")


class SimpleWatch:
    """Counts copies, blocks of the CPU tier, and what taking them does to the device.

    Attributes:
        stored, loaded: blocks whose copy was submitted.
        changed: loaded blocks whose bytes are not those they were stored with, or which
            were never stored.
        tiers: blocks of the CPU tier, as the scheduler and the worker count them.
        twice: copies that were submitted again, by event; and blocks that were stored
            while the tier had them, or another copy of them was under way.
        evicted: blocks that the CPU tier gave up.
        device_calls: what kvcached's pages were asked for while a CPU block was taken or
            freed.
        tier_calls: how often a CPU block was taken or freed.
    """

    def __init__(self, core: Any) -> None:
        self.planner = simple_part(core.scheduler.connector).scheduler_manager
        self.device = core.scheduler.kv_cache_manager.block_pool
        self.stored = self.loaded = self.changed = self.evicted = self.tier_calls = 0
        self.twice: list[str] = []
        self.device_calls: Counter[str] = Counter()
        self._inside = 0
        self._events: set[tuple[bool, int]] = set()
        self._rows: dict[int, tuple[int, str]] = {}
        self._loads: dict[int, list[tuple[int, int, str]]] = {}
        self._watch_copies(core)
        self._watch_tier()

    def _watch_copies(self, core: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = simple_part(get_kv_transfer_group()).worker_handler
        backend = worker._backend
        launch = backend.launch_copy
        layers = layers_of(core.model_executor.driver_worker.worker.model_runner)
        self.tiers = {
            "scheduler": self.planner.num_cpu_blocks,
            "worker": worker.num_cpu_blocks,
            "memory": min(len(rows) for rows in worker.cpu_kv_caches.values()),
        }

        def launch_copy(
            source: Any, target: Any, is_store: bool, event_idx: int, **more: Any
        ) -> None:
            if (is_store, event_idx) in self._events:
                self.twice.append(f"event {event_idx}")
            self._events.add((is_store, event_idx))
            if is_store:
                self.stored += len(source)
                for block, row in zip(source, target, strict=True):
                    group = group_of(self.device.blocks[block].block_hash)
                    self._rows[row] = group, digest(layers[group], block)
            else:
                self.loaded += len(source)
                self._loads[event_idx] = [
                    (block, *self._rows.get(row, NEVER))
                    for row, block in zip(source, target, strict=True)
                ]
            launch(source, target, is_store=is_store, event_idx=event_idx, **more)

        def compare(newest: int, is_store: bool) -> None:
            for event in [] if is_store else [e for e in self._loads if e <= newest]:
                for block, group, expected in self._loads.pop(event):
                    self.changed += digest(layers[group], block) != expected

        after(worker, "_poll_stream_events", compare)
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
        blocks = self.device.blocks
        return [blocks[i].block_hash for transfer in transfers for i in transfer.gpu_block_ids]

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
        for name in ("alloc", "free"):  # of every manager of pages that there may be
            after(type(self.device.kv_cache_manager), name, partial(self._count_device, name))
        after(pool, "_maybe_evict_cached_block", self._count_evicted)

    def _count_evicted(self, evicted: bool, block: Any) -> None:
        self.evicted += evicted

    def _count_device(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self._inside:
            self.device_calls[name] += 1

    def result(self) -> dict[str, Any]:
        return {
            "stored": self.stored,
            "loaded": self.loaded,
            "twice": self.twice,
            "evicted": self.evicted,
            "device_calls": dict(self.device_calls),
            "tier_calls": self.tier_calls,
            "tiers": self.tiers,
            "changed": self.changed,
            "managers": len(MANAGERS),
            "pinned": referenced(self.planner.cpu_block_pool, self.device),
        }


def shut_down_while_copying(llm: Any, prompt: dict[str, Any]) -> None:
    """Shut the engine down while a copy is in flight, which goes on when it is waited for.

    When nobody waits, it goes on after the shutdown, on whatever its memory is then.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from harness.engines.prompting import greedy
    from kvpatch.hostdevice import ledger, streams

    backend = get_kv_transfer_group().worker_handler._backend
    drain = backend.shutdown
    with ExitStack() as hold:
        hold.enter_context(ledger.hold_copies())

        def shutdown() -> None:
            hold.close()
            drain()
            tell("waited for the copies")

        backend.shutdown = shutdown
        tokens = [token + 1 for token in prompt["tokens"]]  # which no tier has yet
        llm.llm_engine.add_request("last", {"prompt_token_ids": tokens}, greedy(4))
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        llm.llm_engine.engine_core.shutdown()
    streams.synchronize()
    tell("copies have ended")


MANAGERS: list[Any] = []


def remember_managers() -> None:
    """Remember every manager of pages that kvcached makes in this process from now on."""
    from kvcached.kv_cache_manager import KVCacheManager

    after(KVCacheManager, "__init__", lambda result, self, *args, **kwargs: MANAGERS.append(self))


def take_cpu_blocks(core: Any, charged: Callable[[], int]) -> list[int]:
    """Take three pages' worth of CPU blocks and free them.

    Returns:
        The device's bytes in use before, while they are taken, and after.
    """
    pool = core.scheduler.connector.scheduler_manager.cpu_block_pool
    # Where both pools are kvcached's, the first to map the page of block 0 keeps the other
    # waiting for it for ever, and the connector's is made first.
    elastic = (
        pool if hasattr(pool, "kv_cache_manager") else core.scheduler.kv_cache_manager.block_pool
    )
    assert elastic.kv_cache_manager._post_init_done.wait(60)
    seen = [charged()]
    blocks = pool.get_new_blocks(96)
    seen.append(charged())
    pool.free_blocks(blocks)
    seen.append(charged())
    return seen
