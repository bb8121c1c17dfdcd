"""vLLM's own classes of a CPU tier in a host pool, without an engine: what their tests share."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from kvpatch import state
from kvpatch.patch import Patch
from kvpatch.patches import host_pool
from kvpatch.patches.host_pool import engine
from kvpatch.patches.host_pool.tier import Pooled
from kvpatch.supported import release_of
from kvpatch.versions import installed

RELEASE = release_of(installed("vllm")[0])
# Rows on what only an engine has.
_OF_ENGINES = (
    *("engine_core", "shutdown", "reset", "schedule", "pending_work", "build", "worker_output"),
)


def rows(*without: str) -> Iterator[Patch]:
    """Yield the rows of the pool over vLLM's classes, but for some."""
    names = {f"host_pool.{name}" for name in (*_OF_ENGINES, *without)}
    return (row for row in host_pool.FEATURE.at(RELEASE) if row.id not in names)


class OffloadingConnector:
    """The connector of a fake engine, which has a scheduler's side."""

    def __init__(self, manager: Any) -> None:
        self.connector_scheduler = SimpleNamespace(manager=manager)


def part(engine_id: str, size: int, ranks: int = 1) -> engine.Part:
    """Return the part in the pool of an engine that starts, with a CPU tier of a size."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=engine_id,
            kv_connector="OffloadingConnector",
            kv_connector_module_path=None,
            kv_connector_extra_config={"cpu_bytes_to_use": size},
        ),
        parallel_config=SimpleNamespace(world_size=ranks),
        model_config=SimpleNamespace(served_model_name="a model"),
    )
    return engine.Part(config)


def by_unit(chunks: int, **bytes_of_one: int) -> dict[str, int]:
    """Return arguments of vLLM's that name chunks, or blocks before 0.30."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    taken = SharedOffloadRegion.__init__.__wrapped__.__code__.co_varnames
    unit = "chunk" if "num_chunks" in taken else "block"
    return {f"num_{unit}s": chunks} | {f"{name}_{unit}": n for name, n in bytes_of_one.items()}


def region(engine_id: str, chunks: int, row: int, rank: int = 0, ranks: int = 1) -> Any:
    """Return vLLM's region of one of the workers, whose chunks have ``row`` bytes of all ranks."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    return SharedOffloadRegion(
        engine_id=engine_id,
        rank=rank,
        cpu_page_size=row // ranks,
        **by_unit(chunks, kv_bytes_per=row),
    )


class InPool:
    """A CPU tier whose memory is the pool's; its keeper turns when it is told to.

    Attributes:
        regions: those of its workers.
    """

    regions: list[Any]

    def join(self, of_engine: engine.Part, manager: Any, primary: Any) -> None:
        """Let the engine's scheduler begin.

        Args:
            of_engine: its part of the pool.
            manager: of its connector.
            primary: of its CPU tier.
        """
        self.core = type("Core", (), {})()
        self.core.scheduler = SimpleNamespace(connector=OffloadingConnector(manager))
        of_engine.begin(self.core)
        found = state.find(primary, Pooled)
        assert found is not None
        self.pooled, self.keeper, self.extents = found, found.keeper, found.extents

    def turn(self, times: int = 1) -> None:
        """Let the keeper look."""
        for _ in range(times):
            self.keeper.turn()
            self.check()

    def check(self) -> None:
        """Fail unless the kernel, the ledger and the extents agree."""
        committed = sum(self.extents.place(index)[1] for index in self.extents.open)
        assert self.kernel() == self.keeper.member.committed == committed

    def kernel(self) -> int:
        """Return the bytes that the kernel has given to the tier."""
        return os.fstat(self.regions[0].fd).st_blocks * 512
