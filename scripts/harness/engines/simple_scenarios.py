"""The fence's scenarios for SimpleCPUOffloadConnector, and some of its own."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import wrapt
from packaging.version import Version

from harness.engines.inside import RELEASE, referenced
from kvpatch.hostdevice import streams

# Before, its reset_cache says that it is not implemented.
CAN_RESET = Version("0.24") <= RELEASE


def copies_of(tier: Any, rows: list[int]) -> list[Any]:
    """Copies of the rows of a CPU tier, as float32."""
    return [tier[row].numpy().ravel().view(np.float32).copy() for row in rows]


def judged(
    stage: Any, read: Callable[..., list[Any]], rows: dict[bytes, int], truth: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare what a CPU tier holds with the truth.

    Args:
        stage: the engine.
        read: returns rows of the tier; runs in the worker.
        rows: of the blocks to compare, by their hashes.
        truth: the bytes of blocks, by rank and hash.
    """
    verdict = {"right": 0, "wrong": 0, "unknown": 0, "most_held": stage.most_held}
    wanted = list(rows.values())
    for rank, found in enumerate(stage.llm.collective_rpc(read, args=(wanted,))):
        for key, row in zip(rows, found, strict=True):
            expected = truth.get(f"{rank}:{key.hex()}")
            if expected is None:
                verdict["unknown"] += 1
                continue
            # A prompt computed in other company differs in the last digits only.
            same = np.allclose(row[: expected.size], expected, atol=1e-3, rtol=1e-3)
            verdict["right" if same else "wrong"] += 1
    return verdict


def read_rows(worker: Any, rows: list[int]) -> list[Any]:
    """Read rows of a worker's CPU tier as float32; runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    (tier,) = get_kv_transfer_group().worker_handler.cpu_kv_caches.values()
    return copies_of(tier, rows)


class SimpleTier:
    """What the connector's CPU tier would serve, and what it holds on to."""

    def __init__(self, stage: Any, unpinned: bool) -> None:
        self.stage = stage
        self.planner = stage.scheduler.connector.scheduler_manager
        if unpinned:
            self._forget_pins()

    def _forget_pins(self) -> None:
        """Let the connector's references to blocks of the device count for nothing."""

        class Unpinned(wrapt.ObjectProxy):  # type: ignore[misc]
            def touch(self, blocks: Any) -> None:
                pass

            def free_blocks(self, blocks: Any) -> None:
                pass

        self.planner._gpu_block_pool = Unpinned(self.stage.pool)

    def judge(self, truth: Mapping[str, Any]) -> dict[str, Any]:
        pool = self.planner.cpu_block_pool
        rows = {
            block.block_hash: block.block_id
            for block in pool.blocks
            if block.block_hash is not None
            and pool.cached_block_hash_to_block.get_one_block(block.block_hash) is block
        }
        verdict = judged(self.stage, read_rows, rows, truth)
        verdict.update(left=self.left(), **self.stage.notes)
        return verdict

    def left(self) -> int:
        """References to blocks and records of requests that nobody is left to give up."""
        planner = self.planner
        pinned = referenced(planner.cpu_block_pool, self.stage.pool)
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
    stage.complete("a", 3)
    stage.quiet()
    loaded = stage.scheduler.connector.scheduler_manager
    with stage.held():
        stage.add("a+", 3)
        stage.step(2)
        assert loaded._reqs_to_load, "nothing was loaded"
        stage.complete("b", 3)
        assert "a+" not in stage.finished
    stage.finish("a+")


def reset_in_flight(stage: Any) -> None:
    """The caches are reset while a store runs; its blocks are neither freed nor served.

    Up to 0.23 it is the device's cache only, and what is stored is served.
    """
    with stage.held():
        stage.complete("a", 3)
        stage.step(3)
        stage.notes["reset_while_copying"] = stage.llm.reset_prefix_cache(reset_connector=CAN_RESET)
        stage.step(3)
    streams.synchronize()
    stage.quiet()
    stage.notes["reset_after"] = stage.llm.reset_prefix_cache(reset_connector=CAN_RESET)


SCENARIOS: dict[str, Callable[[Any], None]] = {
    action.__name__: action for action in (wake, reset_in_flight)
}
