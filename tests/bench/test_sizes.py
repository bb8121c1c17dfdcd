"""What a step, a look or a command costs by the size of an installation: ``-k test_sizes``."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parts import sizes

from kvpatch import private
from kvpatch.control import client, protocol
from kvpatch.environ import STATUS_DIR
from kvpatch.patches.fence.fence import Fence, Transfer
from kvpatch.patches.fence.hooks import forget_freed_blocks
from kvpatch.patches.host_pool.tier import evict
from kvpatch.patches.suspend.simple import SimpleTier
from kvpatch.patches.suspend.spill import Cached, Spill
from kvpatch.pool import ledger, member
from kvpatch.pool.extents import Extents
from kvpatch.pool.keeper import Keeper
from kvpatch.pool.member import Member, View
from kvpatch.pool.record import Owner
from kvpatch.telemetry import reader
from kvpatch.telemetry import status_page as page

MIB = 1 << 20
PAGE = 64  # blocks
PER = 64  # chunks of an extent
GONE = 4_000_000  # above every pid of Linux


def fence() -> Fence:
    return Fence(lambda number: (number * PAGE, (number + 1) * PAGE), workers=1)


@pytest.mark.parametrize("pages", sizes(1000, 4000, 16000))
def test_held_pages(part, pages):
    made = fence()
    made.plan([(n, Transfer("r", tuple(range(n * PAGE, (n + 1) * PAGE)))) for n in range(pages)], 1)
    retired = [(1, list(range(pages)))]
    released, _ = part(
        "fence: a step, pages held by transfers", pages, "pages", lambda: made.split(retired, True)
    )
    assert not released


@pytest.mark.parametrize("requests", sizes(16, 64, 256))
def test_blocks_of_windows(part, requests):
    """Of 128k tokens each, in a step that unmaps a page."""
    status = {
        number: SimpleNamespace(
            group_states=[SimpleNamespace(block_ids=list(range(10**6, 10**6 + 8192)))]
        )
        for number in range(requests)
    }
    planner, made = SimpleNamespace(_sliding_window_groups=(0,), _req_status=status), fence()
    forget_freed_blocks(planner, made, [])
    name = "fence: freed blocks of windows, requests of 128k tokens"
    part(name, requests, "requests", lambda: forget_freed_blocks(planner, made, [1]))


@pytest.mark.parametrize("blocks", sizes(10_000, 100_000, 1_000_000))
def test_a_spill_on_its_way(part, blocks):
    keys = [b"k%032d" % number for number in range(blocks)]
    cached = {key: {block} for block, key in enumerate(keys)}
    pool = SimpleNamespace(_block_id_to_key=dict(enumerate(keys)), _cached_blocks=cached)
    event = SimpleNamespace(gpu_block_ids=range(blocks))
    hashes = [SimpleNamespace(block_hash=key) for key in keys]
    tier = SimpleTier(
        SimpleNamespace(
            _store_event_to_blocks={1: event},
            _gpu_block_pool=SimpleNamespace(blocks=hashes),
            cpu_block_pool=SimpleNamespace(
                num_gpu_blocks=blocks + 1,
                cached_block_hash_to_block=SimpleNamespace(get_one_block=lambda key: None),
                touch=lambda blocks: None,
                free_blocks=lambda blocks: None,
            ),
        )
    )
    spill = Spill(tier, pool)
    spill.begin([Cached(key, block) for block, key in enumerate(keys)])
    spill.planned(keys)
    done = part("spill: a step, blocks on their way", blocks, "blocks", lambda: spill.done)
    assert not done


def tier_of(extents: int) -> tuple[Extents, Any]:
    """A full tier, and its manager."""
    made = Extents(extents * PER, MIB, PER * MIB, clock=iter(range(1, 1 << 60)).__next__)
    for index in range(extents):
        made.add(index)
    keys = [b"k%031d" % number for number in range(extents * PER)]
    chunks = OrderedDict(
        (key, SimpleNamespace(chunk_id=chunk, ref_cnt=0))
        for key, chunk in zip(keys, made.allocate(keys), strict=True)
    )
    policy = SimpleNamespace(get=chunks.get, remove=chunks.pop)
    return made, SimpleNamespace(
        _policy=policy,
        events=None,
        _num_evictable_cache_chunks=len(keys),
        _num_allocated_chunks=len(keys),
    )


def keeper_of(extents: Extents, limit: int) -> Keeper:
    """A keeper whose ledger has no other engines; nothing is evicted or given back."""
    own = extents.chunks * MIB
    ledgers = SimpleNamespace(
        floor=0, committed=own, counted=True, look=lambda *_: View(limit, own, [], 0)
    )
    nothing: Any = SimpleNamespace()
    return Keeper(extents, nothing, ledgers, nothing, threading.RLock(), lambda index: 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("extents", sizes(1024, 4096, 16384))
def test_a_turn_of_the_keeper(part, extents):
    """Of a tier of 64 GiB, 256 GiB and 1 TiB."""
    made, _ = tier_of(extents)
    keeper = keeper_of(made, extents * PER * MIB)
    part("host pool: a turn of the keeper", extents, "extents", keeper.turn)


@pytest.mark.parametrize("extents", sizes(1024, 4096, 16384))
def test_a_store_after_a_limit_was_lowered_to_half(part, extents):
    """The scheduler comes before the keeper, and evicts all that has to go."""

    def lowered() -> tuple[Extents, Any]:
        made, manager = tier_of(extents)
        keeper_of(made, extents * PER * MIB // 2).turn()
        return made, manager

    def store(made: Extents, manager: Any) -> None:
        for index in made.draining():
            evict(manager, made, index)

    name = "host pool: the first store after its limit was lowered to half"
    part(name, extents, "extents", store, setup=lowered)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path in memory."""
    made = Path(tempfile.mkdtemp(prefix="kvpatch-bench-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def owner(name: str) -> Owner:
    return Owner(0, 0, 64 * MIB, 0, MIB, 0.0, 0.0, ledger.pid_namespace(), name)


@pytest.mark.parametrize("engines", sizes(4, 16, 64))
def test_a_look_at_the_ledger(part, engines, folder):
    """Under its lock: at rest each engine looks once a second."""
    members: list[Member] = [
        member.join(ledger.record_of(folder, f"e{number}"), 1 << 40, owner(f"e{number}"))
        for number in range(engines)
    ]
    part("host pool: a look at the ledger", engines, "engines", lambda: members[0].look(0, 0.0))
    for one in members:
        one.leave()


@pytest.mark.parametrize("pages", sizes(10, 100, 1000))
def test_status_pages_of_a_crash_loop(part, pages, folder, monkeypatch):
    monkeypatch.setenv(STATUS_DIR.name, str(folder))
    for number in range(pages):
        page.Writer(GONE + number, "0.1.0").write({"beats": True, "roles": ["engine"]})
    found = part(
        "status: an API server's look, pages of ended processes",
        pages,
        "pages",
        lambda: reader.engines_of((1,)),
    )
    assert not found


@pytest.mark.parametrize("stopped", sizes(1, 4, 16))
def test_an_engine_by_its_name_beside_stopped_ones(part, stopped, folder, monkeypatch):
    monkeypatch.setattr(protocol, "folder", lambda: folder)
    private.check_folder(folder)
    sockets = []
    for number in range(stopped):
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(str(protocol.path_of(f"stopped{number}")))
        sockets[-1].listen(1)
    served = socket.socket(socket.AF_UNIX)
    served.bind(str(protocol.path_of("chat")))
    served.listen(8)

    def serve() -> None:
        while True:
            try:
                connection = served.accept()[0]
            except OSError:
                return
            with connection:
                connection.recv(protocol.LONGEST)
                protocol.send(connection, {"name": "chat"})

    thread = threading.Thread(target=serve)
    thread.start()
    name = "kvpatch suspend NAME: the engine is found, others are stopped"
    found = part(name, stopped, "stopped engines", lambda: client.find("chat"))
    served.shutdown(socket.SHUT_RDWR)
    thread.join()
    for one in (served, *sockets):
        one.close()
    assert found.name == "chat"
