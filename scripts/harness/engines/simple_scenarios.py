"""The fence's scenarios for SimpleCPUOffloadConnector, and some of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from packaging.version import Version

from harness.engines.inside import RELEASE
from kvpatch.hostdevice import streams

# Before, its reset_cache says that it is not implemented.
CAN_RESET = Version("0.24") <= RELEASE


def read_rows(worker: Any, rows: list[int]) -> list[Any]:
    """Read rows of a worker's CPU tier as float32; runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    (tier,) = get_kv_transfer_group().worker_handler.cpu_kv_caches.values()
    return [tier[row].numpy().view(np.float32).copy() for row in rows]


class SimpleTier:
    """What the connector's CPU tier would serve, and what it holds on to."""

    def __init__(self, stage: Any, unpinned: bool) -> None:
        self.stage = stage
        self.planner = stage.scheduler.connector.scheduler_manager
        if unpinned:
            self._forget_pins()

    def _forget_pins(self) -> None:
        """Let the connector's references to blocks of the device count for nothing."""
        pool = self.stage.pool

        class Unpinned:
            def __getattr__(self, name: str) -> Any:
                return getattr(pool, name)

            def touch(self, blocks: Any) -> None:
                pass

            def free_blocks(self, blocks: Any) -> None:
                pass

        self.planner._gpu_block_pool = Unpinned()

    def judge(self, truth: dict[str, Any]) -> dict[str, Any]:
        pool = self.planner.cpu_block_pool
        verdict: dict[str, Any] = {
            "right": 0,
            "wrong": 0,
            "unknown": 0,
            "most_held": self.stage.most_held,
        }
        served = [
            block
            for block in pool.blocks
            if block.block_hash is not None
            and pool.cached_block_hash_to_block.get_one_block(block.block_hash) is block
        ]
        rows = [block.block_id for block in served]
        for rank, found in enumerate(self.stage.llm.collective_rpc(read_rows, args=(rows,))):
            for block, row in zip(served, found, strict=True):
                expected = truth.get(f"{rank}:{block.block_hash.hex()}")
                if expected is None:
                    verdict["unknown"] += 1
                    continue
                same = np.allclose(row[: expected.size], expected, atol=1e-3, rtol=1e-3)
                verdict["right" if same else "wrong"] += 1
        verdict["left"] = self.left()
        verdict.update(self.stage.notes)
        return verdict

    def left(self) -> int:
        """References to blocks and records of requests that nobody is left to give up."""
        planner = self.planner
        pinned: int = sum(
            block.ref_cnt > 0 and not block.is_null
            for pool in (planner.cpu_block_pool, self.stage.pool)
            for block in pool.blocks
        )
        records = sum(
            len(getattr(planner, name, ()))  # older releases do not have all of them
            for name in (
                "_reqs_to_load",
                "_reqs_to_store",
                "_load_event_to_reqs",
                "_pending_cpu_hits",
                "_store_event_to_blocks",
                "_store_event_pending_counts",
                "_store_event_to_reqs",
                "_in_flight_store_gpu_blocks",
                "_abandoned_reqs_to_load",
                "_abandoned_store_event_to_blocks",
            )
        )
        return pinned + records

    def forget(self) -> None:
        """Empty the tier for the next scenario."""
        self.planner.cpu_block_pool.reset_prefix_cache()


def wake(stage: Any) -> None:
    """A request whose load ends many steps later goes on; others do not wait for it."""
    stage.add("a", 3)
    stage.finish("a")
    stage.quiet()
    loaded = stage.scheduler.connector.scheduler_manager
    with stage.held():
        stage.add("a+", 3)
        stage.step(2)
        assert loaded._reqs_to_load, "nothing was loaded"
        stage.add("b", 3)
        stage.finish("b")
        assert "a+" not in stage.finished
    stage.finish("a+")


def reset_in_flight(stage: Any) -> None:
    """The caches are reset while a store runs; its blocks are neither freed nor served.

    Up to 0.23 it is the device's cache only, and what is stored is served.
    """
    with stage.held():
        stage.add("a", 3)
        stage.finish("a")
        stage.step(3)
        stage.notes["reset_while_copying"] = stage.llm.reset_prefix_cache(reset_connector=CAN_RESET)
        stage.step(3)
    streams.synchronize()
    stage.quiet()
    stage.notes["reset_after"] = stage.llm.reset_prefix_cache(reset_connector=CAN_RESET)


SCENARIOS: dict[str, Callable[[Any], None]] = {
    action.__name__: action for action in (wake, reset_in_flight)
}
