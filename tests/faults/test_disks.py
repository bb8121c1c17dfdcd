"""A disk behind the CPU tier that is full, gone bad, in the way, or does not answer."""

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import namespaces
from harness.engines.serving import eventually
from harness.engines.tier_classes import LONG, ROW
from kvpatch.environ import TIER_PATIENCE

FILE = ROW + 4096  # a block and its seal
PATIENCE = 0.2  # seconds; nothing here waits for it longer than it has to


def files(folder: Path, pattern: str = "*.bin") -> list[Path]:
    return sorted(path for path in folder.rglob(pattern) if path.is_file())


def assert_whole(folder: Path) -> None:
    """Every file that there is holds a whole block, and nothing else lies there."""
    assert {file.stat().st_size for file in files(folder)} <= {FILE}
    assert files(folder, "*.tmp") == []


def store_each(one: Any, disk: Path, numbers: range) -> list[int]:
    """Store blocks one by one on a disk without room for all; return those that it has, whole."""
    for number in numbers:
        one.store(number)
    assert_whole(disk)
    kept = [number for number in numbers if one.file(number).exists()]
    assert 0 < len(kept) < len(numbers)
    one.forget()
    for number in numbers:
        assert one.find(number) == ([number] if number in kept else [])
    return kept


@pytest.mark.fault(
    "the disk is full (ENOSPC of a real file system)",
    "what fits is stored whole, the rest is dropped; with room again blocks are stored again",
)
def test_a_disk_without_room(tiers, small):
    disk = small("disk", 3 * FILE + 3 * 4096)
    one = tiers(disk)
    kept = store_each(one, disk, range(1, 7))
    for number in kept:
        one.file(number).unlink()
    lost = min({*range(1, 7)} - {*kept})
    one.store(lost)
    one.forget()
    assert one.find(lost) == [lost]


@pytest.mark.fault(
    "the disk has no inodes left",
    "no file and no folder is made; blocks are dropped and what was stored before is found",
)
def test_a_disk_without_inodes(tiers, small):
    disk = small("disk", 64 * FILE, inodes=12)
    store_each(tiers(disk), disk, range(1, 9))


@pytest.mark.fault(
    "the disk becomes read-only",
    "what was stored is found, new blocks are dropped; writable again, they are stored again",
)
def test_a_disk_that_becomes_read_only(tiers, small):
    disk = small("disk", 64 * FILE)
    one = tiers(disk)
    one.store(1, 2)
    namespaces.remount(disk, read_only=True)
    one.store(3)
    assert len(files(disk)) == 2
    one.forget()
    assert one.find(1, 2, 3) == [1, 2]
    namespaces.remount(disk, read_only=False)
    one.store(3)
    one.forget()
    assert one.find(1, 2, 3) == [1, 2, 3]


def empty(file: Path) -> None:
    os.truncate(file, 0)


def half(file: Path) -> None:
    os.truncate(file, ROW // 2)


def huge(file: Path) -> None:
    """8 GiB without a byte written, where the file system can do that."""
    os.truncate(file, 0)
    os.truncate(file, 8 << 30)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def nowhere(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


@pytest.mark.parametrize("damage", [half, empty, huge, folder, nowhere])
@pytest.mark.fault(
    "a block file is truncated, empty, 8 GiB of nothing, a folder or a dead link",
    "a miss: the block is computed, the blocks before it are served",
)
def test_a_file_that_is_no_block(tiers, small, damage):
    disk = small("disk", 64 * FILE)
    one = tiers(disk)
    one.store(1, 2, 3)
    one.forget()
    damage(one.file(2))
    assert one.find(1, 2, 3) == [1]
    assert one.find(1, 2, 3) == [1]  # whatever it is, also when it is asked again
    assert one.find(3) == [3]


@pytest.mark.fault(
    "a folder in the place of a folder of hashes is a file",
    "blocks of it are dropped, others are stored",
)
def test_a_file_in_the_place_of_a_folder(tiers, small):
    disk = small("disk", 64 * FILE)
    one = tiers(disk)
    in_the_way = one.file(1).parent
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.write_bytes(b"")
    one.store(1)
    one.forget()
    assert one.find(1) == []
    in_the_way.unlink()
    one.store(1)
    one.forget()
    is_used_again(one, 1)


@pytest.fixture
def device(tmp_path):
    """An ext4 file system on a file, which can hang."""
    with namespaces.disk(tmp_path / "disk", tmp_path / "image") as made:
        yield made


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv(TIER_PATIENCE.name, str(PATIENCE))


def store_without_waiting(one: Any, *numbers: int) -> None:
    """Store blocks, and go on while the disk has not answered."""
    drain, one.tier.drain_jobs = one.tier.drain_jobs, lambda: None
    try:
        one.store(*numbers)
    finally:
        one.tier.drain_jobs = drain


def is_used_again(one: Any, *numbers: int) -> None:
    """Its blocks are found; on a busy machine an answer can be late once more."""
    assert eventually(lambda: one.find(*numbers) == list(numbers), LONG)


def late_in_a_write(tiers: Callable[..., Any], device: namespaces.Disk) -> Any:
    """A tier that has stored block 1, and whose disk hangs in the write of block 2."""
    one = tiers(device.folder)
    one.store(1)
    device.hang()
    store_without_waiting(one, 2)
    assert eventually(lambda: one.tier.late, LONG)
    return one


@pytest.mark.fault(
    "the disk hangs in a write (a frozen ext4)",
    "it is passed over after the patience: blocks are served from the CPU tier, lookups are "
    "misses, stores are declined; when it answers it is used again",
)
def test_a_disk_that_hangs_while_writing(impatient, tiers, device):
    one = late_in_a_write(tiers, device)
    assert one.find(1, 2) == [1, 2]  # from the CPU tier
    store_without_waiting(one, 3)
    assert one.find(3) == [3]
    assert one.find(4) == []
    device.go_on()
    one.tier.drain_jobs()
    one.step()
    assert not one.tier.late
    one.forget()
    is_used_again(one, 1, 2)
    assert one.find(3) == []
    assert_whole(device.folder)


@pytest.mark.fault(
    "the caches are reset while the disk hangs",
    "the reset waits for the disk, as vLLM has it: the memory it would free is being written out",
)
def test_a_reset_while_the_disk_hangs(impatient, tiers, device):
    one = late_in_a_write(tiers, device)
    reset = threading.Thread(target=one.forget)
    reset.start()
    reset.join(2 * PATIENCE)
    assert reset.is_alive()
    device.go_on()
    reset.join(LONG)
    assert not reset.is_alive()
    one.step()
    is_used_again(one, 1, 2)


@pytest.mark.fault(
    "the disk hangs when the engine shuts down",
    "the engine ends after the patience and does not wait for the disk",
)
def test_a_disk_that_hangs_at_the_end(impatient, tiers, device):
    one = tiers(device.folder)
    device.hang()
    store_without_waiting(one, 1, 2, 3)
    begun = time.monotonic()
    one.manager.shutdown()
    assert time.monotonic() - begun < LONG
    device.go_on()


@pytest.fixture
def hung_renaming(monkeypatch):
    """Every renaming waits for the event, as on a network disk that went away."""
    answers = threading.Event()
    for name in ("replace", "rename"):
        rename = getattr(os, name)

        def waiting(*args: Any, rename: Any = rename, **kwargs: Any) -> None:
            answers.wait()
            rename(*args, **kwargs)

        monkeypatch.setattr(os, name, waiting)
    yield answers
    answers.set()


@pytest.mark.fault(
    "the disk hangs when a block file gets its name",
    "the file is not found until then; the engine goes on without the tier",
)
def test_a_disk_that_hangs_while_renaming(impatient, tiers, small, hung_renaming):
    disk = small("disk", 64 * FILE)
    one = tiers(disk)
    store_without_waiting(one, 1)
    assert eventually(lambda: one.tier.late, LONG)
    assert files(disk) == []
    assert one.find(1) == [1]  # from the CPU tier
    assert one.find(2) == []
    hung_renaming.set()
    one.tier.drain_jobs()
    one.step()
    one.forget()
    is_used_again(one, 1)


@pytest.mark.fault(
    "reading the disk is EIO (the file behind the loop device is cut off)",
    "blocks on it are misses; the engine goes on, and what it stores then is found",
)
def test_a_disk_that_cannot_be_read(tiers, device, tmp_path):
    one = tiers(device.folder)
    one.store(1, 2)
    os.sync()
    one.forget()
    os.truncate(tmp_path / "image", 0)
    with pytest.raises(OSError, match="Input/output error"):
        os.readv(os.open(one.file(1), os.O_RDONLY | os.O_DIRECT), [mmap.mmap(-1, FILE)])
    assert one.find(1, 2) == []
    one.store(3)
    one.forget()
    assert one.find(3) == [3]
