"""An engine while what is around it is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness import namespaces
from harness.engines.oracle import PLAIN
from harness.engines.runs import Finished, Run
from harness.engines.tiers import SMALL, Serve, answers, assert_plain, hits, on

BLOCK_FILE = 260 << 10
Engine = Callable[[Run], Finished]


@pytest.mark.fault(
    "the disk of an engine has room for three blocks and no more",
    "plain vLLM's tokens; what fits is there, whole",
)
def test_an_engine_on_a_full_disk(serve: Serve, engine: Engine, small: Callable[..., Path]) -> None:
    disk = small("disk", 3 * BLOCK_FILE + (64 << 10))
    finished = serve(on(disk), times=2, engine=SMALL["llama"])
    for time in range(2):
        assert_plain(answers(finished, time), engine(PLAIN))
    assert hits(answers(finished)) == [0] * len(answers(finished))
    files = [path for path in disk.rglob("*") if path.suffix in (".bin", ".tmp")]
    assert {path.stat().st_size for path in files} == {BLOCK_FILE}
    assert 0 < len(files) <= 3


@pytest.fixture
def small_shm() -> Iterator[None]:
    shm = Path("/dev/shm")
    namespaces.mount_tmpfs(shm, 256 << 10)
    yield
    namespaces.unmount(shm)


@pytest.mark.fault(
    "/dev/shm of an engine has 256 KiB",
    "it starts with a CPU tier of its own memory, and serves plain vLLM's tokens",
)
def test_an_engine_on_a_small_dev_shm(serve: Serve, engine: Engine, small_shm: None) -> None:
    run = replace(PLAIN, kvpatch=True, offload=True, environment=(("KVPATCH_STATUS_DIR", ""),))
    assert_plain(answers(serve(run)), engine(PLAIN))
