"""``vllm serve`` twice in one host pool: a reset, and kill -9 of one and then of the other."""

import os
import signal
from contextlib import ExitStack

import psutil
import pytest

from harness.engines.pools import STORED, name_of, pool_of
from harness.engines.runs import Run, block_bytes
from harness.engines.serving import answers, eventually, watched
from harness.serve import Server
from kvpatch.pool import ledger

MIB = 1 << 20
SIZE, EXTENT, NAME = 256 * MIB, 4 * MIB, name_of("served")
FOLDER = ledger.home(NAME)
COUNT = 6
BLOCKS = COUNT * STORED * block_bytes(Run())


def engine_of(server: Server) -> int:
    """The process of a server's engine."""
    (found,) = (
        child.pid
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "VLLM::EngineCore" in " ".join(child.cmdline())
    )
    return found


def resident() -> list[int]:
    """The bytes of blocks of each engine of the pool, the least first."""
    shown = ledger.show(FOLDER)
    return sorted(one.owner.resident for one in shown[1]) if shown is not None else []


def at_rest() -> int:
    """The bytes of blocks of the engine that has most, once its last stores have ended."""
    seen: list[int] = []

    def stays() -> bool:
        seen.append(resident()[-1])
        return seen[-10:].count(seen[-1]) == 10

    assert eventually(stays)
    return seen[-1]


def committed() -> int:
    """The bytes that all engines of the pool have."""
    shown = ledger.show(FOLDER)
    return sum(one.owner.committed for one in shown[1]) if shown is not None else 0


@pytest.fixture(params=["", "eager"], ids=["OffloadingConnector", "SimpleCPUOffloadConnector"])
def serve(request, device, tmp_path):
    """Start a server in the pool, with one of the connectors."""
    run = pool_of(SIZE, "served", request.param)

    def serve(stack: ExitStack, name: str) -> Server:
        return stack.enter_context(watched(run, device, tmp_path / name, fresh=True))

    return serve


def test_memory_comes_back_and_a_killed_server_takes_nothing_from_another(serve):
    with ExitStack() as stack:
        one, two = serve(stack, "one"), serve(stack, "two")
        expected = answers(one, COUNT)
        assert answers(two, COUNT) == expected
        one.reset_caches()
        assert eventually(lambda: resident()[0] == 0)
        left = at_rest()  # of the other server; a store without memory in time is skipped
        assert 0 < left <= BLOCKS
        assert eventually(lambda: committed() <= 1.05 * left + 3 * EXTENT)
        assert answers(one, COUNT) == expected
        assert eventually(lambda: min(resident()) > 0)
        os.kill(engine_of(one), signal.SIGKILL)
        one.process.wait(120)  # it notices that its engine is gone, and ends by itself
        assert eventually(lambda: resident() == [left])
        assert eventually(lambda: committed() <= 1.05 * left + 2 * EXTENT)
        assert answers(two, COUNT) == expected
        assert left <= resident()[0] <= BLOCKS
        os.kill(engine_of(two), signal.SIGKILL)
        two.process.wait(120)
        assert eventually(lambda: ledger.show(FOLDER, remove=True) is None)
    assert list(FOLDER.iterdir()) == []
    FOLDER.rmdir()
