"""Claims of names: one engine at a time, whoever shares /dev/shm, and free when it is gone."""

import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import SQUATS, module, raising, transfer

from kvpatch import claims, private, state
from kvpatch.patches.elastic_memory import ipc_name, pool
from kvpatch.patches.secondary_tiers import parts, shared_memory
from kvpatch.refusal import Refusal

HOLD = """
import sys
from pathlib import Path
from kvpatch import claims
claims.BASE = Path(sys.argv[1])
try:
    claim = claims.take("pool", "chat")
except claims.Taken as taken:
    sys.exit(f"taken by {taken.pid}")
print("holds", flush=True)
sys.stdin.readline()
"""


class EngineCore:
    """What a claim is kept on."""


@pytest.fixture
def shm(tmp_path, monkeypatch):
    """A folder in the place of /dev/shm, and an engine's name."""
    monkeypatch.setattr(claims, "BASE", tmp_path)
    module(monkeypatch, "kvcached.utils", DEFAULT_IPC_NAME="chat")
    return tmp_path


@pytest.fixture
def other_user(monkeypatch):
    """From the call on this process is another user than the owner of its files."""
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.fixture
def holder(shm):
    """Start a process that claims the name; ``before`` is put in front of its command."""
    started = []

    def holder(*before):
        process = subprocess.Popen(
            [*before, sys.executable, "-c", HOLD, shm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield holder
    for process in started:
        process.communicate()


@contextmanager
def refused(code, said, remedy=""):
    """What is refused with a code, in a sentence that has this, and whose remedy has that."""
    with pytest.raises(Refusal) as refusal:
        yield
    assert refusal.value.code == code
    assert said in str(refusal.value)
    assert remedy in refusal.value.remedy


def start(core=None, wrapped=lambda: "started"):
    """Start an engine, as far as its name goes."""
    core = core or EngineCore()
    assert ipc_name.around_engine_start(wrapped, core, (), {}) == "started"
    return core


SHARED = (
    "uses the kvcached name chat, because the two would share a page limit and unmap each other's "
    "pages"
)
SEPARATELY = (
    "engine as a separate program, and give each its own KVCACHED_IPC_NAME if you set one. [KVP414]"
)


def test_a_name_is_for_one_engine_and_its_process_is_named(shm, holder):
    process, said = holder()
    assert said == "holds"
    with pytest.raises(Refusal) as refusal:
        start()
    assert str(refusal.value) == (
        f"kvpatch refuses to start vLLM: another engine (pid {process.pid}) {SHARED}; start every "
        f"{SEPARATELY}"
    )


def test_other_names_and_kinds_are_free(shm):
    held = [claims.take("pool", "chat"), claims.take("tier", "chat"), claims.take("pool", "Chat")]
    held += [claims.take("tier", "a/b"), claims.take("tier", "a-b"), claims.take("tier", "x" * 999)]
    with pytest.raises(claims.Taken):
        claims.take("tier", "a/b")
    assert len(list(claims.folder().iterdir())) == len(held)
    assert stat.S_IMODE(claims.folder().stat().st_mode) == 0o700


def test_a_killed_engine_holds_nothing_and_leaves_nothing(shm, holder):
    process, _ = holder()
    assert claims.held("pool", "chat")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not claims.held("pool", "chat")
    (left,) = claims.folder().iterdir()
    claim = claims.take("tier", "another")  # whatever starts next removes it
    assert not left.exists()
    claim.release()
    assert list(claims.folder().iterdir()) == []


@pytest.mark.parametrize(
    ("of", "goes"),
    [("vllm_offload_a b.mmap", True), ("vllm_offload_x.mmap", False), ("sub/file", False)],
)
def test_the_file_of_a_killed_engine_goes_with_the_next_start(shm, of, goes):
    path = shm / of
    path.parent.mkdir(exist_ok=True)
    path.touch()
    (shm / "vllm_offload_of_another.mmap").touch()
    child = os.fork()
    if child == 0:
        claim = claims.take("tier", "a b")
        claim.cover(of)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    if "x" in of:  # it has become another user's
        os.lchown(path, os.geteuid() + 1, -1)
    claims.take("tier", "another").release()
    assert path.exists() is not goes
    assert (shm / "vllm_offload_of_another.mmap").exists()


def test_the_file_of_an_engine_stays_with_its_claim_and_goes_with_it(shm):
    (shm / "pool").touch()
    claim = claims.take("pool", "chat")
    claim.cover("pool")
    claims.take("tier", "another").release()
    assert (shm / "pool").exists()
    claim.release()
    assert not (shm / "pool").exists()


def test_the_queues_of_a_killed_engine_go_with_the_next_start(shm, monkeypatch):
    """Segments of the process that are there before the engine are somebody else's."""
    from multiprocessing.shared_memory import SharedMemory

    monkeypatch.setattr(claims, "BASE", Path("/dev/shm"))
    monkeypatch.setattr(claims, "folder", lambda: shm)
    theirs, made, mapped = SharedMemory(create=True, size=64), [], []

    def start_engine():
        made.append(SharedMemory(create=True, size=64))
        (shm / "other").write_bytes(b"x")
        with (shm / "other").open("rb") as file:  # what else an engine maps stays
            mapped.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        return "started"

    claim = claims.take("pool", "chat")
    monkeypatch.setattr(ipc_name, "started_by_multiprocessing", lambda: True)
    assert ipc_name._with_queues(claim, start_engine, (), {}) == "started"
    (queue,) = made
    try:
        assert claims._read(claim._file)[2] == [queue.name]
        claim.release()
        with pytest.raises(FileNotFoundError):
            SharedMemory(queue.name)
    finally:
        queue.close()
        theirs.close()
        theirs.unlink()


def test_a_process_that_is_not_vllms_own_keeps_its_segments(shm, monkeypatch):
    monkeypatch.setattr(ipc_name, "started_by_multiprocessing", lambda: False)
    monkeypatch.setattr(ipc_name, "_queues", lambda: pytest.fail("asked"))
    assert ipc_name._with_queues(claims.take("pool", "chat"), lambda: 7, (), {}) == 7


def test_what_an_engine_did_not_make_stays_when_it_is_refused(shm):
    (shm / "pool").touch()
    claims.take("pool", "pool").release()
    assert (shm / "pool").exists()


def test_a_container_with_its_own_namespaces_sees_the_claim(shm, holder, apart):
    """As docker --ipc=host: one /dev/shm, other process and network namespaces."""
    command = apart("--user", "--map-root-user", "--net", "--pid", "--fork")
    mine = claims.take("pool", "chat")
    process, said = holder(*command)
    assert (said, process.communicate()[1].strip()) == ("", "taken by None")
    mine.release()
    _, said = holder(*command)
    assert said == "holds"
    with pytest.raises(claims.Taken, match="None"):
        claims.take("pool", "chat")


FORK = """
import os, sys
from pathlib import Path
from kvpatch import claims
claims.BASE = Path(sys.argv[1])
claim = claims.take("pool", "chat")
read, write = os.pipe()
if os.fork() == 0:
    claim.release()
    del claim
    os._exit(0)
os.wait()
assert claims.held("pool", "chat"), "a forked child gave it back"
if os.fork() == 0:
    os.close(write)
    os.read(read, 1)
    os._exit(0)
claim.release()
assert not claims.held("pool", "chat"), "a forked child keeps it"
claims.take("pool", "chat").release()
os.close(write)
os.wait()
"""


def test_a_container_with_its_own_users_has_the_same_folder(shm, monkeypatch):
    """Of one user's containers, one may run as root in a user namespace and another as the user."""
    monkeypatch.setattr(claims, "Path", lambda path: SimpleNamespace(read_text=lambda: uid_map))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    uid_map = "         0       1000          1\n         1     100000      65536\n"
    assert claims.folder().name == "kvpatch-claims-1000"
    for user, outer in ((1, 100000), (33, 100032)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert claims.folder().name == f"kvpatch-claims-{outer}"
    uid_map = "         0          0 4294967295\n"
    assert claims.folder().name == "kvpatch-claims-33"


def test_a_forked_child_neither_gives_a_name_back_nor_keeps_a_released_one(shm):
    """A flock is the open file's, of which a forked child has a copy."""
    subprocess.run([sys.executable, "-c", FORK, shm], check=True, timeout=60)


def test_a_start_that_failed_gives_the_name_back(shm):
    """The error keeps the engine alive, as IPython's last error and pytest's do."""
    with pytest.raises(MemoryError) as kept:
        start(wrapped=raising(MemoryError("CUDA out of memory")))
    core = start()
    assert kept.value
    with pytest.raises(Refusal) as refusal:
        start()
    assert str(refusal.value) == (
        f"kvpatch refuses to start vLLM: another engine of this process (pid {os.getpid()}) "
        f"{SHARED}; shut that one down first, or start every {SEPARATELY}"
    )
    assert ipc_name.after_engine_shutdown(lambda: "shut down", core, (), {}) == "shut down"
    core = start()
    core.itself = core  # a circle, as in vLLM's engine
    del core
    start()  # an engine that was deleted needs no shutdown


@pytest.mark.parametrize("squat", ["folder", "file", "link", "open folder"])
def test_a_squatted_folder_is_a_refusal_that_names_it(shm, squat, other_user):
    if squat == "folder":
        other_user()
    path = claims.folder()
    if squat == "folder":
        path.mkdir()
        fault = f"belongs to {private.user(os.getuid())}"
    elif squat == "file":
        path.touch()
        fault = "is a file instead of a folder"
    elif squat == "link":
        path.symlink_to(shm)
        fault = "is a link instead of a folder"
    else:
        path.mkdir()
        path.chmod(0o777)
        fault = "is open to other users (mode 0777)"
    remedy = "have it removed by" if squat == "folder" else f"rm -r {path}"
    with refused("KVP416", f"{path} {fault}, because", remedy):
        start()


def test_a_full_shm_is_a_refusal(shm, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", raising(full))
    core = EngineCore()
    with pytest.raises(Refusal) as refusal:
        start(core)
    assert str(refusal.value) == (
        f"kvpatch refuses to start vLLM: {shm}/chat cannot be made, because it failed with "
        f"OSError: No space left on device; make room in {shm} (df -h {shm}; --shm-size of a "
        "container), or set KVPATCH=0. [KVP417]"
    )
    monkeypatch.undo()


def test_the_pool_is_there_with_its_memory_and_closed_before_kvcached_opens_it(shm):
    old = os.umask(0)
    try:
        start()
    finally:
        os.umask(old)
    status = (shm / "chat").stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert (status.st_size, status.st_blocks > 0) == (24, True)
    start()
    assert os.path.samestat(status, (shm / "chat").stat()), "one that was closed stays"


def test_a_pool_that_others_could_open_is_made_anew(shm):
    """Whoever has the old file open may hold its lock, for which kvcached waits for ever."""
    (shm / "chat").write_bytes(b"x" * 24)
    (shm / "chat").chmod(0o644)
    with (shm / "chat").open() as opened_by_another:
        start()
        assert not os.path.samestat(os.fstat(opened_by_another.fileno()), (shm / "chat").stat())
    assert stat.S_IMODE((shm / "chat").stat().st_mode) == 0o600


def test_a_pool_that_kvpatch_named_goes_with_its_engine(shm, monkeypatch):
    monkeypatch.setenv(ipc_name._GIVEN, "chat")
    core = start()
    assert (shm / "chat").exists()
    claims.release(core)
    assert not (shm / "chat").exists()


@pytest.mark.parametrize("squat", ["file", *SQUATS])
def test_a_squatted_pool_is_a_refusal_that_names_it(shm, squat, other_user):
    path, other = shm / "chat", shm / "elsewhere"
    other.touch(0o600)
    if squat == "file":
        path.write_bytes(b"x" * 24)
        other_user()
        fault = f"belongs to {private.user(os.getuid())}"
    else:
        make, fault = SQUATS[squat]
        make(path, other)
    with refused("KVP416", f"{path} {fault}, because its owner could", "KVCACHED_IPC_NAME"):
        pool.make("chat")
    assert other.read_bytes() == b""


def tier(engine_id="one", core=None, start=lambda config: "started"):
    config = SimpleNamespace(kv_transfer_config=transfer("OffloadingConnector"))
    config.kv_transfer_config.engine_id = engine_id
    return shared_memory.around_engine_core(start, core or EngineCore(), (config,), {})


def test_two_engines_with_one_engine_id_that_start_together(shm):
    """vLLM makes the file when the model is loaded: the second engine starts before that."""

    def while_the_first_loads(config):
        with pytest.raises(Refusal) as refusal:
            tier()
        assert str(refusal.value) == (
            f"kvpatch refuses to start vLLM: another engine of this process (pid {os.getpid()}) "
            f"has the engine_id one, because the two would share {shm}/vllm_offload_one.mmap, and "
            "load each other's blocks; give each engine its own engine_id in kv_transfer_config. "
            "[KVP413]"
        )
        assert tier("two") == "started"
        return "both"

    first = EngineCore()
    assert tier(core=first, start=while_the_first_loads) == "both"
    with pytest.raises(Refusal, match="KVP413"):
        tier()  # for the engine's life
    ipc_name.after_engine_shutdown(lambda: None, first, (), {})
    assert tier() == "started"


def test_a_region_that_is_there_is_a_refusal_and_the_engine_id_free_again(path):
    path.touch(0o600)
    with refused("KVP413", f"the CPU tier's shared memory {path} already exists, because another"):
        tier()
    path.unlink()
    assert tier() == "started"


def test_a_region_goes_with_its_engine(shm):
    """vLLM leaves it if the worker that made it is killed."""
    path, core = shared_memory.region_path("one"), EngineCore()
    tier(core=core, start=lambda config: path.touch(0o600))
    claims.release(core)
    assert not path.exists()


def test_an_engine_that_was_dropped_needs_no_shutdown(shm):
    core = EngineCore()
    core.itself = core  # a circle, as in vLLM's engine
    tier(core=core)
    del core
    assert tier() == "started"


@pytest.mark.parametrize("config", [SimpleNamespace(kv_transfer_config=None), SimpleNamespace()])
def test_an_engine_without_a_connector_is_left_alone(shm, config):
    start, named = shared_memory.around_engine_core, {"vllm_config": config}
    assert start(lambda vllm_config: "started", EngineCore(), (), named) == "started"
    assert not claims.folder().exists()


def test_an_engine_id_is_free_after_a_failed_start(shm):
    core = EngineCore()
    with pytest.raises(MemoryError):
        tier(core=core, start=raising(MemoryError))
    assert tier() == "started"


@pytest.mark.parametrize("ends", ["shut down", "killed"])
def test_the_parts_of_a_large_tier_go_with_the_engine_that_made_them(shm, ends):
    """From 0.33 on; vLLM makes every part but the first exclusively."""
    made = [shm / f"vllm_offload_one.mmap{part}" for part in ("", ".1", ".31")]

    def load(config):
        def make(config):
            for path in made:
                path.touch(0o600)
            return "started"

        return parts.around_kv_caches(make, core, (config,), {})

    core = EngineCore()
    assert tier(core=core, start=load) == "started"
    if ends == "killed":  # the kernel drops its locks
        (claim,) = state.find(core, claims.Held).claims
        claim.release.detach()
        os.close(claim._file)
        assert all(path.exists() for path in made)
        assert tier() == "started"
    else:
        ipc_name.after_engine_shutdown(lambda: None, core, (), {})
    assert not any(path.exists() for path in made)


def test_an_engine_without_the_connector_has_no_parts(shm):
    for config in (None, transfer("SimpleCPUOffloadConnector")):
        given = SimpleNamespace(kv_transfer_config=config)
        for core in (EngineCore(), start()):  # the second one holds a name
            assert parts.around_kv_caches(lambda config: config, core, (given,), {}) is given
            claims.release(core)


def test_an_engine_whose_claims_were_released_covers_no_part(shm):
    core = EngineCore()

    def load(config):
        claims.release(core)
        return parts.around_kv_caches(lambda config: "loaded", core, (config,), {})

    assert tier(core=core, start=load) == "loaded"


@pytest.fixture
def path(shm):
    """The shared memory of the engine_id one."""
    return shared_memory.region_path("one")


class Region:
    """vLLM's ``SharedOffloadRegion``, as far as it opens its file."""

    def __init__(self, engine_id, path):
        try:
            self.fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except FileExistsError:
            self.fd = os.open(path, os.O_RDWR)

    def cleanup(self):
        os.close(self.fd)
        del self.fd


def region(path, before=lambda: None, rank=0, name="engine_id"):
    made = Region.__new__(Region)

    def wrapped(*args, **kwargs):
        before()
        made.__init__("one", path)
        return "made"

    try:
        named = {name: "one", "rank": rank} if name else {}
        given = () if name else ("one", 4, rank)
        assert shared_memory.around_region(wrapped, made, given, named) == "made"
    finally:
        if hasattr(made, "fd"):
            made.cleanup()


def test_the_workers_of_an_engine_share_a_region(path):
    region(path)
    region(path)
    path.unlink()
    region(path, before=lambda: None)
    unlinked = lambda: (path.unlink(), path.touch(0o600), path.unlink())  # noqa: E731
    region(path, before=unlinked)  # from 0.29 on the name goes once all workers are there


@pytest.fixture
def workers(monkeypatch):
    """Let a worker in a process of its own map a region, and go on to have it."""
    monkeypatch.setattr(shared_memory, "_files", {})
    monkeypatch.setattr(shared_memory, "_of_workers", [])
    told = []
    with ExitStack() as mapped:

        def start(path, **more):
            region(path, **more)
            mapped.enter_context(path.open("rb"))
            told.append(shared_memory.files(None))
            shared_memory._files.clear()
            shared_memory.expect(told)

        yield start


@pytest.mark.parametrize("name", ["engine_id", "instance_id", ""])  # the second up to 0.25
def test_the_scheduler_maps_what_its_workers_have(path, workers, name):
    workers(path, name=name)
    workers(path, name=name)
    region(path, rank=None, name=name)


def refused_scheduler(path, **more):
    with refused("KVP427", f"shared memory {path} was removed or replaced while"):
        region(path, rank=None, **more)


def test_a_scheduler_that_finds_no_region_makes_none(path, workers):
    workers(path)
    path.unlink()
    refused_scheduler(path, before=lambda: pytest.fail("it was made"))
    assert not path.exists()


@pytest.mark.parametrize("again", [False, True], ids=["removed", "replaced"])
def test_a_scheduler_that_maps_another_file_than_its_workers_is_refused(path, workers, again):
    workers(path)
    if again:
        path.unlink()
        path.touch(0o600)
    refused_scheduler(path, before=path.unlink)


def test_a_worker_that_finds_no_region_of_its_pool_is_refused(path, workers):
    """The engine has made it, and no worker makes another."""
    with pytest.raises(Refusal, match="KVP427"):
        region(path, before=path.stat)


@pytest.mark.parametrize("maps", ["two files", "nothing"])
def test_workers_that_map_two_files_are_refused(path, workers, maps):
    workers(path)
    if maps == "two files":
        path.unlink()
        workers(path)
    else:
        shared_memory.expect([*shared_memory._of_workers, {}])
    refused_scheduler(path)


@pytest.mark.parametrize("when", ["before", "meanwhile", "when it is opened"])
def test_a_region_that_another_user_made_is_a_refusal_that_names_him(path, when, other_user):
    def plant():
        path.touch(0o600)
        other_user()
        if when == "when it is opened":
            raise PermissionError(path)

    if when == "before":
        plant()
    said = f"{path} belongs to {private.user(os.getuid())}, because another user could read"
    with refused("KVP416", said, "engine_id"):
        region(path, before=plant if when != "before" else lambda: pytest.fail("it was opened"))


def test_a_region_that_others_can_open_is_refused(path):
    path.touch()
    path.chmod(0o666)
    with pytest.raises(Refusal, match=r"is open to other users \(mode 0666\)"):
        region(path)


def test_a_region_that_cannot_be_joined_for_another_reason_is_vllms_error(path):
    with pytest.raises(TimeoutError):
        region(path, before=raising(TimeoutError("Timed out waiting for mmap file")))
