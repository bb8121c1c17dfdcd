"""Block files: whole or absent, private, checked against what was stored, and direct I/O."""

import mmap
import os
import resource
import stat
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from kvpatch.patches.secondary_tiers import block_files, timeout
from kvpatch.patches.secondary_tiers.block_files import SEAL, load_blocks, own_folder, store_blocks

SIZE = mmap.PAGESIZE
NOT_STORED = "does not hold the bytes that were stored"


def paths(folder, *names):
    return [str(folder / "layout_r0/000/00_g0" / name) for name in names]


def offsets(names):
    return [position * SIZE for position in range(len(names))]


def store(names, contents):
    """Store blocks, each full of one byte, from a memory that ends with the last of them."""
    with mmap.mmap(-1, len(names) * SIZE) as room, memoryview(room) as view:
        view[:] = b"".join(content * SIZE for content in contents)
        store_blocks(names, view, offsets(names), SIZE, False)


def loaded(names):
    """Load blocks; return those that came, by the bytes that are in each, and the error."""
    with mmap.mmap(-1, len(names) * SIZE) as room, memoryview(room) as view:
        failed = None
        try:
            load_blocks(names, view, offsets(names), SIZE, False)
        except OSError as error:
            failed = error
        came = offsets(names) if failed is None else offsets(names)[: failed.num_succeeded]
        return [bytes({*view[offset : offset + SIZE]}) for offset in came], failed


def load(names):
    contents, failed = loaded(names)
    if failed is not None:
        raise failed
    return contents


def test_blocks_come_back_in_any_order(tmp_path):
    one, two = paths(tmp_path, "one.bin", "two.bin")
    store([one, two], [b"1", b"2"])
    assert load([two, one]) == [b"2", b"1"]
    assert Path(one).stat().st_size == SIZE + SEAL


def test_a_file_that_exists_is_left_as_it_is(tmp_path):
    one, two = paths(tmp_path, "one.bin", "two.bin")
    store([one], [b"1"])
    moved = []
    again = partial(store, [one, two], [b"2", b"2"])
    timeout.Unanswered(10).run("job", again, moved.append)
    assert load([one, two]) == [b"1", b"2"]
    assert moved == [0, SIZE]


@pytest.mark.parametrize("removed", range(5))
def test_a_folder_that_others_remove_is_made_again_three_times(tmp_path, removed):
    folders = iter(range(removed))

    def use():
        for _ in folders:
            (tmp_path / "layout").rmdir()
            raise FileNotFoundError
        return "opened"

    (tmp_path / "layout").mkdir()
    opened = nullcontext() if removed < 4 else pytest.raises(FileNotFoundError)
    with opened:
        assert block_files._in_folders(str(tmp_path / "layout/one.bin"), use) == "opened"
    assert (tmp_path / "layout").is_dir() is (removed < 4)


def test_without_a_size_nobody_makes_room():
    assert not block_files.Ledger().kept


def test_those_before_the_first_fault_count(tmp_path):
    names = paths(tmp_path, "one.bin", "two.bin", "three.bin")
    store(names, [b"1", b"2", b"3"])
    os.truncate(names[2], SIZE)
    contents, failed = loaded(names)
    assert contents == [b"1", b"2"]
    assert NOT_STORED in str(failed)
    Path(names[0]).unlink()
    contents, failed = loaded(names)
    assert contents == []
    assert isinstance(failed, FileNotFoundError)


def test_the_folder_of_another_layout_counts(tmp_path):
    (one,) = paths(tmp_path, "one.bin")
    store([one], [b"1"])
    (tmp_path / "layout_r0").rename(tmp_path / "other_r0")
    with pytest.raises(OSError, match=NOT_STORED):
        load([one.replace("layout_r0", "other_r0")])
    assert not Path(one.replace("layout_r0", "other_r0")).exists()


def test_a_tier_may_be_moved_as_a_whole(tmp_path):
    store(paths(tmp_path / "old", "one.bin"), [b"1"])
    (tmp_path / "old").rename(tmp_path / "new")
    assert load(paths(tmp_path / "new", "one.bin")) == [b"1"]


def test_what_lies_outside_the_memory_is_an_error(tmp_path):
    for offset in (-SIZE, SIZE, 1):
        with pytest.raises(ValueError, match="is outside"):
            store_blocks(paths(tmp_path, "one.bin"), memoryview(bytes(SIZE)), [offset], SIZE, False)


def test_files_and_folders_are_for_this_user_only(tmp_path):
    """The first file of a folder and a later one are opened by two calls, each with a mode."""
    one, two = paths(tmp_path, "one.bin", "two.bin")
    before = os.umask(0)
    try:
        store([one], [b"1"])
        store([two], [b"2"])
        own_folder(tmp_path / "layout_r0")
        own_folder(tmp_path / "other/layout_r0")
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_block_that_does_not_fit_on_the_disk_leaves_no_file(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))
    try:
        with pytest.raises(OSError, match="the disk is full, and the block was not written whole"):
            store(paths(tmp_path, "one.bin"), [b"1"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_no_file_stays_open(tmp_path):
    names = paths(tmp_path, "one.bin", "two.bin")
    before = len(list(Path("/proc/self/fd").iterdir()))
    store(names, [b"1", b"2"])
    load(names)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("given", "direct"), [((), True), ((True,), True), ((False,), False)], ids=str
)
def test_direct_io_is_the_default_and_only_where_it_is_wanted(tmp_path, monkeypatch, given, direct):
    flag = os.O_APPEND  # stands for O_DIRECT on any disk
    monkeypatch.setattr(block_files, "_DIRECT", flag)
    seen = []
    real = os.open

    def opened(path, flags, *more, **by_name):
        if str(path).startswith(str(tmp_path)) and not flags & os.O_DIRECTORY:
            seen.append(bool(flags & flag))
        return real(path, flags, *more, **by_name)

    monkeypatch.setattr(os, "open", opened)
    names = paths(tmp_path, "one.bin")
    with mmap.mmap(-1, SIZE) as room, memoryview(room) as view:
        block_files.replace_store(None)(names, view, [0], SIZE, *given)
        block_files.replace_load(None)(names, view, [0], SIZE, *given)
    assert set(seen) == {direct}
    assert len(seen) >= 2


def test_a_file_with_a_whole_seal_of_another_length_is_damaged(tmp_path):
    (one,) = paths(tmp_path, "one.bin")
    store([one], [b"1"])
    os.truncate(one, SIZE + mmap.PAGESIZE // 2)
    with pytest.raises(OSError, match=NOT_STORED):
        load([one])
    assert not Path(one).exists()
