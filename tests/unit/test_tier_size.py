"""A tier that has a size: the oldest files go first, whoever shares the folder or is killed."""

import errno
import multiprocessing
import os
import signal
import sqlite3
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_tier_files
from fakes import raising
from test_tier_files import SIZE

from kvpatch.cli.status import disk_line
from kvpatch.doctor import tiers as doctor
from kvpatch.patches.metrics import tiers
from kvpatch.patches.secondary_tiers import capacity
from kvpatch.patches.secondary_tiers.block_files import ABANDONED, SEAL, noted_in
from kvpatch.patches.secondary_tiers.capacity import Folder, Full, ledger_of, size_of
from kvpatch.telemetry import schema

FILE = SIZE + SEAL
LAYOUT = "layout_r0"


def path(root, number):
    name = f"{number:064x}"
    return f"{root}/{LAYOUT}/{name[-3:]}/{name[-5:-3]}_g0/{name}.bin"


def of(root, files, **more):
    return Folder(str(root), files * FILE, 10, **more)


def content(number):
    return bytes([number % 251])


def store(folder, *numbers):
    for number in numbers:
        with noted_in(folder):
            test_tier_files.store([path(folder.root, number)], [content(number)])


def load(folder, number):
    with noted_in(folder):
        assert test_tier_files.load([path(folder.root, number)]) == [content(number)]


def kept(root):
    return sorted(int(one.stem, 16) for one in Path(root).rglob("*.bin"))


def known(root):
    """The ledger's bytes and the sum of its files, which are the same in a sound one."""
    database = sqlite3.connect(ledger_of(Path(root)))
    [(held,)] = database.execute("SELECT held FROM folder")
    [(files,)] = database.execute("SELECT coalesce(sum(size), 0) FROM files")
    database.close()
    return held, files


@pytest.fixture(autouse=True)
def an_empty_disk(monkeypatch):
    """The disk of the test machine may be nearly full."""
    disk = SimpleNamespace(f_blocks=1 << 30, f_frsize=4096, f_bavail=1 << 30)
    monkeypatch.setattr(capacity.os, "statvfs", lambda root: disk)
    return disk


def test_the_oldest_by_their_last_use_go_first(tmp_path):
    removed = []
    folder = of(tmp_path, 3, removed=removed.append)
    store(folder, 1, 2, 3)
    assert folder.adopting is None  # it has made the ledger itself
    load(folder, 1)
    store(folder, 4)
    assert kept(tmp_path) == [1, 3, 4]
    store(folder, 3)  # it has a file: that is a use
    store(folder, 5)
    assert kept(tmp_path) == [3, 4, 5]
    assert removed == [FILE, FILE]
    assert folder.held == 3 * FILE
    assert known(tmp_path) == (3 * FILE, 3 * FILE)
    # The folders of what was removed went too, but those that have files.
    assert len(list((tmp_path / LAYOUT).glob("*/*_g0"))) == 3


def test_engines_of_one_folder_agree(tmp_path):
    one, other = of(tmp_path, 3), of(tmp_path, 3)
    store(one, 1, 2)
    store(other, 3)
    load(one, 1)
    store(other, 4)
    assert kept(tmp_path) == [1, 3, 4]
    with pytest.raises(FileNotFoundError):
        load(one, 2)
    load(other, 1)
    assert known(tmp_path) == (3 * FILE, 3 * FILE)


def test_what_is_used_together_is_noted_together(tmp_path):
    folder = of(tmp_path, 3)
    store(folder, 1, 2, 3)
    for number in (1, 2):
        folder.use(path(tmp_path, number))
    folder.lost(path(tmp_path, 3))  # which is there all the same
    folder.settle()
    store(folder, 4)
    assert kept(tmp_path) == [1, 2, 4]


def test_names_are_those_in_the_folder_which_may_be_moved(tmp_path):
    store(of(tmp_path / "kv", 2), 1, 2)
    (tmp_path / "kv").rename(tmp_path / "moved")
    store(of(tmp_path / "moved", 2), 3)
    assert kept(tmp_path / "moved") == [2, 3]


def test_a_file_that_someone_removed_is_written_and_noted_again(tmp_path):
    folder = of(tmp_path, 2)
    store(folder, 1)
    Path(path(tmp_path, 1)).unlink()
    store(folder, 1, 2)
    assert known(tmp_path) == (2 * FILE, 2 * FILE)


def test_a_file_that_cannot_be_removed_is_an_error_and_changes_nothing(tmp_path, monkeypatch):
    folder = of(tmp_path, 2)
    store(folder, 1, 2)
    folder.use(path(tmp_path, 1))
    with monkeypatch.context() as broken:
        broken.setattr(Folder, "_remove", raising(PermissionError))
        with pytest.raises(PermissionError):
            store(folder, 3)
    assert known(tmp_path) == (2 * FILE, 2 * FILE)
    store(folder, 3)
    assert kept(tmp_path) == [1, 3]


def test_an_engine_without_a_size_keeps_the_ledger_of_others(tmp_path):
    without = Folder(str(tmp_path), 0, 10)
    store(without, 1)
    without.adopt()
    assert not ledger_of(tmp_path).exists()
    store(of(tmp_path, 3), 2)
    store(without, 3, 4, 5)
    load(without, 1)  # before the ledger, and now known
    assert kept(tmp_path) == [1, 2, 3, 4, 5]
    assert known(tmp_path) == (5 * FILE, 5 * FILE)
    store(of(tmp_path, 3), 6)
    assert kept(tmp_path) == [1, 5, 6]
    without.use(path(tmp_path, 1))
    ledger_of(tmp_path).unlink()
    without.settle()
    assert not ledger_of(tmp_path).exists()


def test_what_was_there_before_is_adopted_and_trimmed_once(tmp_path, monkeypatch):
    store(Folder(str(tmp_path), 0, 10), *range(100))
    for number in range(100):
        os.utime(path(tmp_path, number), (1000 + number, 1000 + number))
    tmp_path.joinpath(LAYOUT).chmod(0o700)
    plain = tmp_path / "plain_r0/000/00_g0"
    plain.mkdir(parents=True)
    (tmp_path / "plain_r0").chmod(0o755)
    (plain / "1.bin").touch()
    os.utime(plain / "1.bin", (1, 1))
    of(tmp_path, 40).adopt()
    assert kept(tmp_path / LAYOUT) == list(range(60, 100))
    assert (plain / "1.bin").exists()  # vLLM's own, without kvpatch
    assert known(tmp_path) == (40 * FILE, 40 * FILE)
    monkeypatch.setattr(Folder, "_files", None)
    of(tmp_path, 30).adopt()
    assert kept(tmp_path / LAYOUT) == list(range(70, 100))


def test_what_is_known_or_gone_is_not_adopted(tmp_path, monkeypatch):
    store(Folder(str(tmp_path), 0, 10), 1, 2)
    for number in (1, 2):
        os.utime(path(tmp_path, number), (1000 + number, 1000 + number))
    folder = of(tmp_path, 2)
    load(folder, 1)  # later than it was written
    (tmp_path / LAYOUT).chmod(0o700)
    there = [*folder._files(), (f"{LAYOUT}/000/00_g0/gone.bin", FILE, 1)]
    monkeypatch.setattr(Folder, "_files", lambda folder: iter(there))
    folder.adopt()
    assert known(tmp_path) == (2 * FILE, 2 * FILE)
    store(folder, 3)
    assert kept(tmp_path) == [1, 3]


def test_an_adoption_that_ended_early_is_begun_again(tmp_path, monkeypatch):
    store(Folder(str(tmp_path), 0, 10), 1, 2)
    with monkeypatch.context() as broken:
        broken.setattr(Folder, "_adopt", lambda folder, found: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            of(tmp_path, 9).adopt()
    found = [*of(tmp_path, 9)._files(), (f"{LAYOUT}/000/00_g0/gone.bin", FILE, 1)]
    monkeypatch.setattr(Folder, "_files", lambda folder: iter(found))
    of(tmp_path, 9).adopt()
    assert known(tmp_path) == (2 * FILE, 2 * FILE)


def test_a_file_that_is_being_written_counts_and_is_not_removed(tmp_path, monkeypatch):
    folder = of(tmp_path, 2)
    folder.reserve(path(tmp_path, 1), FILE)
    folder.reserve(path(tmp_path, 2), FILE)
    with pytest.raises(Full, match=r"no room for a block of 8 KiB") as error:
        folder.reserve(path(tmp_path, 3), FILE)
    assert error.value.errno == errno.ENOSPC
    folder.lost(path(tmp_path, 1))
    folder.reserve(path(tmp_path, 3), FILE)
    # Until its writer must be gone.
    now = capacity.time.time_ns()
    for seconds in (ABANDONED - 1, ABANDONED + 1):
        later = now + int(seconds * 1e9)
        monkeypatch.setattr(capacity.time, "time_ns", lambda later=later: later)
        with pytest.raises(Full) if seconds < ABANDONED else nullcontext():
            folder.reserve(path(tmp_path, 4), FILE)
    assert known(tmp_path) == (2 * FILE, 2 * FILE)


def test_a_block_larger_than_the_size_removes_nothing(tmp_path):
    folder = of(tmp_path, 2)
    store(folder, 1, 2)
    with pytest.raises(Full):
        folder.reserve(path(tmp_path, 3), 2 * FILE + 1)
    assert kept(tmp_path) == [1, 2]
    with pytest.raises(Full):
        Folder(str(tmp_path / "small"), 1, 10).reserve(path(tmp_path / "small", 1), FILE)


def test_a_write_that_fails_gives_its_room_back(tmp_path, monkeypatch):
    folder = of(tmp_path, 2)
    with monkeypatch.context() as broken:
        broken.setattr(os, "writev", lambda file, parts: 0)
        for number in (1, 2, 3):
            with pytest.raises(OSError, match="not written whole"):
                store(folder, number)
    assert known(tmp_path) == (0, 0)


def test_a_damaged_file_is_forgotten(tmp_path):
    folder = of(tmp_path, 2)
    store(folder, 1)
    os.truncate(path(tmp_path, 1), 10)
    with pytest.raises(OSError, match="does not hold the bytes"):
        load(folder, 1)
    assert known(tmp_path) == (0, 0)


@pytest.mark.parametrize(
    ("blocks", "floor"), [(1 << 30, 4 << 30), (1 << 14, int((1 << 26) * 0.05))]
)
def test_a_full_disk_is_never_reached(tmp_path, an_empty_disk, blocks, floor):
    """The floor is 4 GiB, or of a small disk 5 %."""
    an_empty_disk.f_blocks, an_empty_disk.f_bavail = blocks, blocks
    folder = of(tmp_path, 1000)
    store(folder, *range(10))
    an_empty_disk.f_bavail = -(-(floor + FILE) // 4096)
    store(folder, 10)
    assert kept(tmp_path) == list(range(11))
    an_empty_disk.f_bavail -= 1  # twice what is stored goes at most, as room may come back late
    store(folder, 11)
    assert kept(tmp_path) == list(range(1, 12))
    an_empty_disk.f_bavail = -(-(floor // 2 + FILE) // 4096)
    store(folder, 12)
    assert kept(tmp_path) == list(range(3, 13))
    an_empty_disk.f_bavail -= 1
    with pytest.raises(Full):
        store(folder, 13)
    assert kept(tmp_path) == list(range(5, 13))
    with pytest.raises(Full):
        folder.reserve(path(tmp_path, 14), 2 * FILE)
    assert kept(tmp_path) == list(range(9, 13))


def test_what_is_being_written_is_taken_off_the_free_space(tmp_path, an_empty_disk):
    folder = of(tmp_path, 1 << 20)
    an_empty_disk.f_bavail = ((4 << 30) + (1 << 20)) // 4096
    folder.reserve(path(tmp_path, 1), 1 << 19)
    with pytest.raises(Full):
        folder.reserve(path(tmp_path, 2), (1 << 19) + 1)
    folder.reserve(path(tmp_path, 3), 1 << 19)


def test_what_is_over_a_lowered_size_is_removed_in_steps_by_one_thread(tmp_path, monkeypatch):
    files = 5 * capacity._AT_ONCE
    store(of(tmp_path, files), *range(files))
    folder = of(tmp_path, 3)
    with monkeypatch.context() as unfinished:
        unfinished.setattr(Folder, "adopt", lambda folder: None)
        for left in (files - capacity._AT_ONCE, files - 2 * capacity._AT_ONCE):
            with pytest.raises(Full):
                store(folder, files)
            folder.adopting.join()
            assert len(kept(tmp_path)) == left
            assert known(tmp_path) == (left * FILE, left * FILE)
        folder.adopting = running = threading.current_thread()
        with pytest.raises(Full):
            store(folder, files)
        assert folder.adopting is running
        folder.adopting = threading.Thread()  # it is not alive
    with pytest.raises(Full):
        folder.reserve(path(tmp_path, files), FILE // 2)
    folder.adopting.join()
    assert kept(tmp_path) == list(range(files - 3, files))
    store(folder, files)
    assert kept(tmp_path) == list(range(files - 2, files + 1))


def test_a_large_block_gets_the_room_of_many_small_ones(tmp_path):
    files = 3 * capacity._AT_ONCE
    store(of(tmp_path, files), *range(files))
    folder = of(tmp_path, files - 1)
    with pytest.raises(Full):  # its own size and no more at once
        folder.reserve(path(tmp_path, files), capacity._AT_ONCE * FILE)
    folder.adopting.join()
    assert kept(tmp_path) == list(range(capacity._AT_ONCE, files))
    folder.reserve(path(tmp_path, files), (files - 2) * FILE)
    assert kept(tmp_path) == [files - 1]


def test_a_reader_of_a_removed_file_has_all_of_it(tmp_path):
    folder = of(tmp_path, 1)
    store(folder, 1)
    with Path(path(tmp_path, 1)).open("rb") as reader:
        store(folder, 2)
        assert not Path(path(tmp_path, 1)).exists()
        assert reader.read(SIZE) == b"\1" * SIZE


def test_a_folder_that_is_removed_is_begun_again(tmp_path):
    folder = of(tmp_path / "kv", 2)
    store(folder, 1, 2)
    (tmp_path / "kv").rename(tmp_path / "away")
    store(folder, 3)
    assert kept(tmp_path / "kv") == [3]
    assert known(tmp_path / "kv") == (FILE, FILE)


def test_a_ledger_that_is_removed_is_made_again_of_the_files(tmp_path):
    folder = of(tmp_path, 3)
    store(folder, 1, 2)
    (tmp_path / LAYOUT).chmod(0o700)
    ledger_of(tmp_path).unlink()
    store(folder, 3)
    assert folder.adopting.daemon
    folder.adopting.join()
    assert known(tmp_path) == (3 * FILE, 3 * FILE)
    ledger_of(tmp_path).unlink()
    store(of(tmp_path, 3), 4)  # which makes it, and has adopted nothing
    store(folder, 5)
    folder.adopting.join()
    assert len(kept(tmp_path)) == 3
    assert known(tmp_path) == (3 * FILE, 3 * FILE)


def test_a_damaged_ledger_is_made_anew(tmp_path):
    store(of(tmp_path, 2), 1, 2)
    ledger_of(tmp_path).write_bytes(b"x" * 100_000)
    with pytest.raises(OSError, match="the ledger of the tier cannot be used"):
        store(of(tmp_path, 2), 3)
    other = of(tmp_path, 2)
    other.adopt()
    assert known(tmp_path) == (2 * FILE, 2 * FILE)
    store(other, 3)
    assert len(kept(tmp_path)) == 2
    # By an engine that had it open.
    journal = ledger_of(tmp_path).with_name("files.db-journal")
    assert journal.exists()
    ledger_of(tmp_path).write_bytes(b"x" * 100_000)
    with pytest.raises(OSError, match="the ledger of the tier cannot be used"):
        store(other, 4)
    assert not ledger_of(tmp_path).exists()
    assert not journal.exists()


def test_a_ledger_that_is_locked_is_a_miss_and_loads_go_on(tmp_path):
    folder = Folder(str(tmp_path), 2 * FILE, 0.01)
    store(folder, 1)
    other = sqlite3.connect(ledger_of(tmp_path), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OSError, match="database is locked"):
        store(folder, 2)
    load(folder, 1)
    other.close()
    store(folder, 2, 3)
    assert kept(tmp_path) == [2, 3]


@pytest.mark.parametrize("reads", [False, True], ids=["locked", "read by another"])
def test_loads_and_lookups_do_not_wait_for_a_ledger_and_the_next_store_notes_them(tmp_path, reads):
    folder = Folder(str(tmp_path), 3 * FILE, 3600)
    store(folder, 1, 2, 3)
    other = sqlite3.connect(ledger_of(tmp_path), isolation_level=None)
    other.execute("BEGIN" if reads else "BEGIN IMMEDIATE")
    other.execute("SELECT * FROM files").fetchall()
    Path(path(tmp_path, 2)).unlink()

    def fail():
        with pytest.raises(FileNotFoundError):
            load(folder, 2)

    calls = [lambda: load(folder, 1)] * 3 + [fail]
    calls += [lambda: load(Folder(str(tmp_path), 3 * FILE, 3600), 3)]  # has not opened it yet
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    other.close()
    store(folder, 4)
    assert known(tmp_path) == (3 * FILE, 3 * FILE)
    store(folder, 5)
    assert kept(tmp_path) == [1, 4, 5]


def test_what_is_used_while_another_thread_has_the_ledger_is_noted_by_that_one(tmp_path):
    folder = of(tmp_path, 3)
    store(folder, 1, 2, 3)
    settle = folder._settle

    def meanwhile(*args):
        folder._settle = settle
        with noted_in(folder):
            folder.use(path(tmp_path, 2))
        settle(*args)

    folder._settle = meanwhile
    load(folder, 1)
    store(of(tmp_path, 3), 4)
    assert kept(tmp_path) == [1, 2, 4]


def test_a_store_waits_for_other_threads_and_engines_together(tmp_path):
    folder = Folder(str(tmp_path), 2 * FILE, 0.5)
    folder.reserve(path(tmp_path, 1), FILE)
    [(waits,)] = folder._database.execute("PRAGMA busy_timeout")
    assert 0 < waits <= 500
    folder.use(path(tmp_path, 1))
    folder.settle()
    assert folder._database.execute("PRAGMA busy_timeout").fetchone() == (0,)
    with folder._lock, pytest.raises(TimeoutError, match="another thread has the ledger"):
        folder.reserve(path(tmp_path, 2), FILE)


def test_uses_that_no_ledger_takes_are_dropped_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(capacity, "_WAITING", 2)
    folder = of(tmp_path, 9)
    for number in (1, 2, 1, 3):
        folder.use(path(tmp_path, number))
    assert [int(Path(name).stem, 16) for name in folder._uses] == [1, 3]


def test_the_ledger_is_this_users_alone(tmp_path):
    store(of(tmp_path, 2), 1)
    assert ledger_of(tmp_path).parent.stat().st_mode & 0o077 == 0
    ledger_of(tmp_path).parent.chmod(0o755)
    with pytest.raises(PermissionError, match="open to other users"):
        store(of(tmp_path, 2), 2)


def test_a_size_may_be_a_part_of_the_file_system(monkeypatch):
    for text, size in (("", 0), ("2GiB", 2 << 30), ("50%", 1 << 41)):
        monkeypatch.setenv("KVPATCH_TIER_SIZE", text)
        assert size_of("/") == size


def churn(root, first, started):
    folder = of(root, 20)
    number = first
    while True:
        store(folder, number)
        number += 1
        if number == first + 30:
            started.set()
        with suppress(FileNotFoundError):
            load(folder, number - 5)


def test_engines_that_are_killed_leave_a_folder_that_others_go_on_with(tmp_path):
    spawn = multiprocessing.get_context("fork")
    started = [spawn.Event() for _ in range(3)]
    engines = [
        spawn.Process(target=churn, args=(tmp_path, 10_000 * number, event), daemon=True)
        for number, event in enumerate(started, 1)
    ]
    for engine in engines:
        engine.start()
    assert all(event.wait(60) for event in started)
    for engine in engines:
        os.kill(engine.pid, signal.SIGKILL)
        engine.join()
    held, files = known(tmp_path)
    assert held == files <= 20 * FILE
    assert len(kept(tmp_path)) <= 20
    store(of(tmp_path, 20), *range(1, 15))
    assert {*range(1, 15)} <= {*kept(tmp_path)}
    assert len(kept(tmp_path)) <= 20


def test_doctor_says_what_goes_and_what_stays():
    assert list(doctor.check({})) == []
    assert list(doctor.check({"KVPATCH_TIER_SIZE": "much"})) == []  # reported with the environment
    (said,) = doctor.check({"KVPATCH_TIER_SIZE": "50%"})
    assert said.what == (
        "in the root_dir of every tier fs your engines keep 50% of its file system of block files, "
        "and of the disk the smaller of 4 GiB and 5 % free: the oldest by their last use are "
        "removed first"
    )
    said, warned = doctor.check({"KVPATCH_TIER_SIZE": "500"})
    assert "keep 500 B of block files" in said.what
    assert warned.what == "KVPATCH_TIER_SIZE is 500 B, which few prompts fill"


def test_status_and_series_say_how_full_it_is(tmp_path):
    folder = of(tmp_path, 2)
    assert tiers._size(folder) == {"held_bytes": 0, "size_bytes": 2 * FILE}
    store(folder, 1)
    size = tiers._size(folder)
    assert size == {"held_bytes": FILE, "size_bytes": 2 * FILE}
    assert tiers._size(Folder(str(tmp_path), 0, 10)) == tiers._size(None) == {}
    disk = {"connector": "C", "tier": "fs", "errors": {"full": 3}, "bytes": {"evicted": 4096}}
    assert disk_line(disk | size) == (
        "8 KiB of 16 KiB in block files; this engine removed 4 KiB for newer ones; 3 stores not "
        "made, there was no room"
    )
    assert disk_line(disk | size | {"errors": {}, "bytes": {}}) == "8 KiB of 16 KiB in block files"
    assert schema._disk(disk) and schema._disk(disk | size)
    assert not schema._disk(disk | {"size_bytes": 5})
