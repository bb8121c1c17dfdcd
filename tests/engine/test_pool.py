"""What kvpatch changes in kvcached's pool and its workers' sockets: its extension, no engine.

Each test runs in a process of its own, which runs this file.
"""

import ctypes
import fcntl
import functools
import inspect
import json
import os
import pickle
import random
import re
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path
from types import SimpleNamespace as Made

import pytest

from harness.engines.runs import Device, Run
from kvpatch import patches, state
from kvpatch.patch import apply
from kvpatch.refusal import Refusal

MIB = 1 << 20
BLOCKS = 256
PATCHES = [f"elastic_memory.socket_{name}" for name in ("folder", "path", "peer")]

if __name__ == "__main__":
    import torch  # noqa: F401, whose libraries kvcached's extension needs
    from kvcached import _C, tp_ipc_util, utils
    from kvcached import vmm_ops as ops
    from kvcached.cli.utils import get_ipc_path, get_kv_cache_limit, update_kv_cache_limit
    from kvcached.kv_cache_manager import KVCacheManager

    from kvpatch.patches.elastic_memory import pool
    from kvpatch.patches.suspend.giving import Giving
    from kvpatch.upstream import kvcached_api

    NAME = utils.DEFAULT_IPC_NAME
    SOCKETS = Path(tp_ipc_util.SOCKET_DIR)


def process_of(test, folder, **given):
    """Run a function on a device and under a name of kvcached of its own; return what it logs."""
    name = f"kvpatch-test-{uuid.uuid4().hex[:8]}"
    environment = Device(folder, size="256MiB").environ(Run(kvpatch=False))
    done = subprocess.run(
        [sys.executable, __file__, test.__name__, json.dumps(given)],
        env=environment | {"KVCACHED_IPC_NAME": name},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    Path("/dev/shm", name).unlink(missing_ok=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def apart(test):
    """Let a test run in a process of its own."""

    @functools.wraps(test)
    def run(tmp_path, **given):
        process_of(test, tmp_path, **given)

    names = ("tmp_path", *inspect.signature(test).parameters)
    run.__signature__ = inspect.Signature(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names
    )
    return run


def patched(*ids):
    for feature in patches.FEATURES:
        for patch in feature.patches:
            if patch.id in ids:
                apply(patch)


def tensors(size=16 * MIB):
    ops.create_kv_tensors(size, 1, "cuda:0", 2, num_kv_buffers=1, group_id=0, unified_pool=True)


def pages(**options):
    return KVCacheManager(BLOCKS, 16, 4096, 2, num_kv_buffers=1, **options)


def manager():
    ops.init_kvcached("cuda:0", 2 * MIB, True)
    tensors()
    made = pages()
    made._wait_post_init()
    return made


def wait_until(true):
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def worker_answers():
    """Ask this process's own worker, and stop it."""
    assert tp_ipc_util.broadcast_kv_tensors_created(1) is False
    assert tp_ipc_util.stop_worker_listener_threads()


class Code:
    """What ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (3,)


@apart
def test_the_pool_of_an_engine_stays_closed_to_other_users():
    os.umask(0)
    pool.make(NAME)
    made = manager()
    status = Path("/dev/shm", NAME).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600, oct(status.st_mode)
    assert get_kv_cache_limit(NAME).total_size == 32 * MIB
    assert made.shutdown()
    assert not Path("/dev/shm", NAME).exists()


@pytest.mark.parametrize(
    ("blocks", "tokens"),
    [(250, 16), (31, 16), (32, 16), (40, 96), (40, 120)],  # 64, 384 and 480 KiB of a page of 2 MiB
)
@apart
def test_as_many_blocks_as_kvcached_hands_out_are_usable(blocks, tokens):
    ops.init_kvcached("cuda:0", 2 * MIB, True)
    tensors(32 * MIB)
    made = KVCacheManager(blocks, tokens, 4096, 2, num_kv_buffers=1, reserve_null_block=True)
    found = kvcached_api.Blocks(blocks, tokens * 4096, 2)
    if not found.usable:
        assert not made._post_init_done.wait(1), "kvcached waits for block 0 no more"
        os._exit(0)
    made._wait_post_init()
    given = 1  # block 0
    while made.alloc(1) is not None:
        given += 1
    assert found.usable == given, (found.usable, given)
    for number in (given, given + 1):
        again = kvcached_api.Blocks(found.for_use(number), found.size, 2)
        assert again.usable >= number
    assert found.for_use(given) <= blocks < found.for_use(given + 1)


@apart
def test_a_limit_is_read_while_another_has_kvcacheds_lock():
    made = manager()
    update_kv_cache_limit(NAME, 8 * MIB)
    found = []
    with Path(get_ipc_path(NAME)).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        asks = threading.Thread(target=lambda: found.append(kvcached_api.limit(made)))
        asks.daemon = True
        asks.start()
        asks.join(60)
        assert found == [8 * MIB], found
        fcntl.flock(file, fcntl.LOCK_UN)


@apart
def test_a_pool_without_a_limit_has_the_allocators():
    made = manager()
    size = kvcached_api.pages_at_most(made) * kvcached_api.page_bytes(made)
    nearly = (1).to_bytes(8, sys.byteorder) + bytes(16)  # less than a byte of each layer
    for content in (bytes(24), nearly, b""):  # kvctl limit NAME 0, and 1; and cut off
        Path(get_ipc_path(NAME)).write_bytes(content)
        wait_until(lambda: kvcached_api.reported_limit(made) is None)
        assert kvcached_api.limit(made) == size > 0
        assert kvcached_api.is_applied(made)
    Path(get_ipc_path(NAME)).unlink()
    assert kvcached_api.limit(made) == size


@apart
def test_pages_are_counted_when_they_change():
    class Asked:
        def __init__(self, real):
            self.real, self.counts, self.neighbours = real, 0, 0

        def get_num_free_pages(self):
            self.counts += 1
            return self.real.get_num_free_pages()

        def get_avail_physical_pages(self):
            return max(0, self.real.get_avail_physical_pages() - self.neighbours)

        def __getattr__(self, name):
            return getattr(self.real, name)

    by_kvcached = KVCacheManager.available_size
    patched("elastic_memory.available")
    made = manager()
    allocator = made.page_allocator = Asked(made.page_allocator)

    def check():
        # Read here first: kvcached's own method reads the device anew, and so would hide it.
        found, before = made.available_size(), made._avail_physical_pages_ts
        expected = by_kvcached(made)
        if made._avail_physical_pages_ts == before:
            assert found == expected, (found, expected)

    source, taken = random.Random(1), []
    for _ in range(300):
        if source.random() < 0.55 and (more := made.alloc(source.randrange(1, 40))):
            taken += more
        elif taken:
            source.shuffle(taken)
            cut = source.randrange(1, 60)
            made.free(taken[:cut])
            del taken[:cut]
        check()
    made.free(taken)
    made.alloc(8)
    time.sleep(0.3)  # its thread maps pages ahead of use
    check()

    begun, asked = time.monotonic(), allocator.counts
    for _ in range(1000):
        made.available_size()
    assert allocator.counts - asked <= 2 + (time.monotonic() - begun) * 10

    allocator.neighbours = 1000  # they fill the device
    time.sleep(0.11)
    pages = allocator.get_num_reserved_pages()
    assert made.available_size() <= made.num_avail_blocks + pages * 32
    allocator.neighbours = 0
    time.sleep(0.11)

    before = made.available_size()
    update_kv_cache_limit(NAME, 16 * MIB)  # as another process does
    wait_until(lambda: kvcached_api.reported_limit(made) == 8 * MIB)
    made.alloc(1)
    assert made.available_size() == 4 * 32 - 9 < before


@apart
def test_blocks_are_counted_when_a_limit_could_be_applied():
    patched("elastic_memory.shrink")
    made = manager()
    taken = made.alloc(100)
    assert kvcached_api.pages_in_use(made) == 4
    counted = []
    count = made._get_num_alloced_blocks
    made._get_num_alloced_blocks = lambda: counted.append(1) or count()
    assert not made.resize(2 * made.page_size)
    assert not made.page_allocator.resize(2 * made.page_size), "it is applied above the goal"
    made.free(taken[97:])  # of the last page, which stays
    made.free(taken[32:64])
    assert made.in_shrink and not counted
    made.free(taken[64:96])
    # Refused as long as its other thread maps a page ahead, and tried in the next look.
    wait_until(lambda: made._maybe_finish_shrink() or not made.in_shrink)
    assert counted and kvcached_api.pages_at_most(made) == 2


@apart
def test_no_page_is_mapped_above_a_limit_that_waits_to_be_applied():
    patched("suspend.limit")
    made = manager()
    pool = Made(kv_cache_manager=made, _evictable_blocks={}, _block_id_to_key={})
    scheduler = Made(kv_cache_manager=Made(block_pool=pool))
    giving = Giving(Made(scheduler=scheduler), None, lambda: True)
    state.attach(made, giving)
    taken = made.alloc(100)
    pages = kvcached_api.pages_in_use(made)
    assert pages == 4
    assert not made.resize(2 * made.page_size)
    assert giving.lowers
    while more := made.alloc(1):
        taken += more
    assert kvcached_api.pages_in_use(made) == pages, "it grows above the limit"
    giving.advance()  # nothing can be stored and evicted: kvcached shrinks by itself
    made.free(taken[:-1])
    # Refused as long as its other thread maps a page ahead, and tried in the next free.
    wait_until(lambda: made._maybe_finish_shrink() or kvcached_api.pages_at_most(made) == 2)
    assert made.alloc(40) is not None


def limits_above():
    """With the pool full of cached blocks, which are evicted only if nothing is free."""
    patched("elastic_memory.limit")
    made = manager()
    cached = made.alloc(made.available_size() // 16 * 16)
    update_kv_cache_limit(NAME, 256 * MIB)
    wait_until(lambda: made.page_allocator.get_resize_target() == 128 * MIB)
    for _ in range(3):
        assert made.alloc(32) is None
        assert made.available_size() < 32, made.available_size()
    made.free(cached[:64])
    assert len(made.alloc(32)) == 32
    assert max(made.alloc(16)) < BLOCKS
    update_kv_cache_limit(NAME, 512 * MIB)
    wait_until(lambda: made.page_allocator.get_resize_target() == 256 * MIB)
    made.alloc(1)
    update_kv_cache_limit(NAME, 32 * MIB)
    wait_until(lambda: made.page_allocator.get_resize_target() == 16 * MIB)
    made.alloc(1)
    os._exit(0)


def test_a_limit_above_what_the_engine_started_with_changes_nothing(tmp_path):
    said = process_of(limits_above, tmp_path)
    told = [line for line in said.splitlines() if "kvpatch: the limit" in line]
    assert len(told) == 2, said
    assert "the limit of 256 MiB for the pool kvpatch-test-" in told[0]
    assert "is above the 32 MiB that its engine started with" in told[0]
    assert "the limit of 512 MiB" in told[1]


@pytest.mark.parametrize(("fenced", "waits"), [(False, True), (True, False)])
@apart
def test_an_unmap_that_the_fence_permits_waits_for_no_copy(fenced, waits):
    """With asynchronous scheduling and its worker in its process, as one GPU has by default."""
    from kvcached.integration.vllm import interfaces

    interfaces.init_kvcached(device="cuda:0", is_worker=True, async_sched=True)
    tensors()
    made = pages(async_sched=True)
    made._wait_post_init()
    calls = []
    count = ctypes.CFUNCTYPE(None)(lambda: calls.append(1))
    ctypes.CDLL(_C.__file__).kvpatch_host_on_synchronize(count)
    if fenced:
        kvcached_api.unmap_at_once(made)
    mapped = made.page_allocator.get_page_state()
    blocks = made.alloc(BLOCKS // 2)
    made.free(blocks)
    made.trim()
    assert bool(calls) is waits, (calls, mapped, made.page_allocator.get_page_state())
    assert made.alloc(BLOCKS // 2) is not None


@apart
def test_a_request_that_comes_before_block_0_waits_for_it():
    """kvcached waits with the lock that the thread which reserves block 0 needs."""
    patched("elastic_memory.reservation")
    ops.init_kvcached("cuda:0", 2 * MIB, True)
    made = pages(async_sched=True, reserve_null_block=True)
    got = []
    request = threading.Thread(target=lambda: got.append(made.alloc(1)), daemon=True)

    def waits():
        frames = traceback.walk_stack(sys._current_frames()[request.ident])
        names = {frame.f_code.co_name for frame, _ in frames}
        return not names.isdisjoint({"around_wait", "_wait_post_init"})

    request.start()
    wait_until(waits)
    tensors()
    request.join(60)
    assert got == [[1]], got
    made._wait_post_init()  # without the lock


@apart
def test_a_worker_and_its_engine_talk_in_a_closed_folder():
    patched(*PATCHES)
    os.umask(0)
    tp_ipc_util.start_worker_listener_thread(0)
    tp_ipc_util.start_worker_listener_thread(1, pp_rank=1)
    places = (SOCKETS, SOCKETS / "w0.sock", SOCKETS / "pp1/w1.sock")
    assert [stat.S_IMODE(one.lstat().st_mode) for one in places] == [0o700, 0o600, 0o600]
    ops.init_kvcached("cuda:0", 2 * MIB, True)
    worker_answers()
    assert not SOCKETS.exists()


@apart
def test_a_worker_of_another_engine_that_shares_tmp_alone_is_left_alone():
    patched(*PATCHES)
    tp_ipc_util.start_worker_listener_thread(0)
    tp_ipc_util.start_worker_listener_thread(0)  # its own it may replace
    other = os.fork()
    if other == 0:
        tp_ipc_util._listeners.clear()  # as a process that was not forked
        try:
            tp_ipc_util.start_worker_listener_thread(0)
        except Refusal as refusal:
            os._exit(3 if refusal.code == "KVP414" else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 3
    worker_answers()


@apart
def test_the_socket_of_a_worker_that_is_gone_is_replaced():
    patched(*PATCHES)
    SOCKETS.mkdir(0o700)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(SOCKETS / "w0.sock"))
    dead.listen()
    dead.close()
    tp_ipc_util.start_worker_listener_thread(0)
    ops.init_kvcached("cuda:0", 2 * MIB, True)
    worker_answers()


@pytest.mark.parametrize(
    ("squat", "fault"),
    [
        ("open", "is open to other users (mode 0777)"),
        ("link", "is a link instead of a folder"),
        ("file", "is a file instead of a folder"),
        ("foreign", "belongs to "),
    ],
)
@apart
def test_a_squatted_folder_is_a_refusal_of_the_worker(squat, fault):
    patched(*PATCHES)
    if squat in ("open", "foreign"):
        SOCKETS.mkdir(0o700)
    if squat == "open":
        SOCKETS.chmod(0o777)
    elif squat == "link":
        SOCKETS.symlink_to("/tmp")
    elif squat == "file":
        SOCKETS.touch()
    else:
        uid = os.getuid()
        os.geteuid = lambda: uid + 1
    try:
        with pytest.raises(Refusal, match=re.escape(f"{SOCKETS} {fault}")) as refused:
            tp_ipc_util.start_worker_listener_thread(0)
        assert refused.value.code == "KVP416"
    finally:
        SOCKETS.rmdir() if squat in ("open", "foreign") else SOCKETS.unlink()


@apart
def test_an_engine_reads_nothing_from_a_folder_that_others_can_enter():
    """What answers there is unpickled, so that it runs code."""
    patched(*PATCHES)
    SOCKETS.mkdir()
    SOCKETS.chmod(0o777)
    answer = pickle.dumps(Code())
    planted = socket.socket(socket.AF_UNIX)
    planted.bind(str(SOCKETS / "w0.sock"))
    planted.listen()

    def serve():
        connection, _ = planted.accept()
        connection.recv(65536)
        connection.sendall(len(answer).to_bytes(4, "big") + answer)

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(RuntimeError, match=f"{SOCKETS} is open to other users"):
        tp_ipc_util.broadcast_kv_tensors_created(1)
    (SOCKETS / "w0.sock").unlink()
    SOCKETS.rmdir()


@apart
def test_a_worker_reads_nothing_from_another_user():
    patched("elastic_memory.socket_peer")
    ours, theirs = socket.socketpair()
    uid = os.getuid()
    tp_ipc_util.send_msg(theirs, {"cmd": "kv_tensors_created"})
    assert tp_ipc_util.recv_msg(ours) == {"cmd": "kv_tensors_created"}
    tp_ipc_util.send_msg(theirs, Code())
    os.geteuid = lambda: uid + 1
    with pytest.raises(PermissionError, match="connected to a worker's socket"):
        tp_ipc_util.recv_msg(ours)


if __name__ == "__main__":
    inspect.unwrap(globals()[sys.argv[1]])(**json.loads(sys.argv[2]))
