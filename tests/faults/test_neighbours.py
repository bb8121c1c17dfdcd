"""Other users, other machines and other containers beside an engine."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import namespaces
from harness.engines.tier_classes import ROW
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR
from kvpatch.hostdevice import ledger

NOBODY = 65534


@pytest.fixture
def public():
    """A folder that everybody can reach and write to, as /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="kvpatch-faults-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_nobody(call: Callable[[], Any]) -> str:
    """Call as another user, in a fork; the name of the error, or what is returned."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = str(call())
        except BaseException as error:
            said = type(error).__name__
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


@pytest.mark.fault(
    "a second user on the machine looks for the blocks of a tier in a shared folder",
    "folders and files are for the engine's user only",
)
def test_another_user_reads_no_block(tiers, public):
    one = tiers(public / "disk")
    one.store(1)
    file = one.file(1)
    assert file.exists()
    assert as_nobody(lambda: public.exists()) == "True"
    assert as_nobody(file.read_bytes) == "PermissionError"
    assert as_nobody(lambda: list(file.parent.iterdir())) == "PermissionError"
    assert as_nobody(lambda: (file.parent / "planted.bin").write_bytes(b"")) == "PermissionError"


@pytest.mark.fault(
    "a second user starts an engine on the host device",
    "each user has a device and a ledger of his own",
)
def test_another_user_has_a_device_of_his_own(public, monkeypatch):
    monkeypatch.setenv(HOST_DEVICE.name, "64MiB")
    monkeypatch.setenv(HOST_DEVICE_DIR.name, str(public))
    mine = ledger.ledger_path()
    os.close(os.open(mine, os.O_CREAT | os.O_WRONLY, 0o600))
    assert as_nobody(mine.read_bytes) == "PermissionError"
    assert as_nobody(ledger.ledger_path) == str(mine).replace("-0-0", f"-{NOBODY}-0")
    assert as_nobody(ledger.usage) == "{}"


@pytest.fixture
def two_views(tmp_path, small):
    """One disk, mounted where two machines have it."""
    disk, other = small("machine-a", 64 * 4 * ROW), tmp_path / "machine-b"
    other.mkdir()
    namespaces.bind(disk, other)
    return disk, other


@pytest.mark.fault(
    "two machines have one disk mounted, at different places",
    "each finds the blocks of the other; what one removes is a miss of the other",
)
def test_two_machines_share_what_they_stored(tiers, two_views):
    here, there = (tiers(folder) for folder in two_views)
    here.store(1, 2)
    there.store(3)
    assert there.find(1, 2, 3) == [1, 2, 3]
    assert here.find(1, 2, 3) == [1, 2, 3]
    here.file(2).unlink()
    there.forget()
    assert there.find(1, 2, 3) == [1]


@pytest.mark.fault(
    "two machines store the same blocks on one disk at the same time",
    "one file a block, whole; both find what was stored",
)
def test_two_machines_store_the_same_blocks_at_once(tiers, two_views):
    both = [tiers(folder) for folder in two_views]
    blocks = [(first, first + 1) for first in range(1, 33, 2)]
    start = threading.Barrier(len(both))

    def store(one: Any) -> None:
        start.wait()
        for pair in blocks:
            one.store(*pair)

    threads = [threading.Thread(target=store, args=(one,)) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [path for path in two_views[0].rglob("*") if path.suffix in (".bin", ".tmp")]
    assert len(names) == 32
    assert {path.stat().st_size for path in names} == {ROW + 4096}
    for one in both:
        one.forget()
        assert [one.find(*pair) for pair in blocks] == [list(pair) for pair in blocks]


CONTAINER = """
import sys
from pathlib import Path
from test_tier_classes import FEATURE, Tiers, Transaction, fingerprint, installed, release_of

Transaction().apply_all(FEATURE.at(release_of(installed("vllm")[0])))
fingerprint._described = "one layout"
one = Tiers(Path(sys.argv[1]))
print("found", one.find(1, 2, 3))
one.store(4)
one.manager.shutdown()
"""


@pytest.mark.fault(
    "a container (pid, ipc, network, host name and mounts of its own) on the same disk",
    "it finds the blocks of the engine outside, and the engine outside those of it",
)
def test_a_container_on_the_same_disk(tiers, two_views):
    here = tiers(two_views[0])
    here.store(1, 2, 3)
    lane = Path(__file__).parents[1] / "engine"
    apart = ["unshare", "--pid", "--ipc", "--net", "--uts", "--mount", "--fork", "--mount-proc"]
    path = os.pathsep.join([str(lane), *filter(None, sys.path)])
    done = subprocess.run(
        [*apart, sys.executable, "-c", CONTAINER, str(two_views[1])],
        env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "found [1, 2, 3]" in done.stdout, done.stderr[-2000:]
    assert here.find(4) == [4]


@pytest.fixture
def small_shm(small):
    """Make /dev/shm as small as a container's, for this process."""
    shm = Path("/dev/shm")
    mounted = []

    def mount(size: int) -> None:
        namespaces.mount_tmpfs(shm, size)
        mounted.append(shm)

    yield mount
    for folder in mounted:
        namespaces.unmount(folder)


@pytest.mark.fault(
    "/dev/shm has 256 KiB, and the CPU tier does not fit",
    "it is not made, with an error that says so, and leaves no file; one that fits starts",
)
def test_a_cpu_tier_larger_than_dev_shm(tiers, small_shm):
    small_shm(256 << 10)
    with pytest.raises(Exception, match="/dev/shm"):
        tiers(blocks=64)
    assert not list(Path("/dev/shm").iterdir())
    one = tiers(blocks=8)
    one.store(1)
    assert one.find(1) == [1]
    one.manager.shutdown()
