"""Block files: whole or absent, private, and checked against what was stored."""

import mmap
import os
import resource
import stat
from pathlib import Path

import pytest

from kvpatch.patches.secondary_tiers.block_files import SEAL, load_blocks, store_blocks

SIZE = mmap.PAGESIZE


@pytest.fixture
def memory():
    with mmap.mmap(-1, 4 * SIZE) as room:
        yield room


def paths(folder, *names):
    return [str(folder / "layout_r0/000/00_g0" / name) for name in names]


def store(memory, names, contents):
    for position, content in enumerate(contents):
        memory[position * SIZE : (position + 1) * SIZE] = content * SIZE
    with memoryview(memory) as view:
        store_blocks(names, view, [position * SIZE for position in range(len(names))], SIZE, False)


def load(memory, names):
    memory[:] = bytes(len(memory))
    with memoryview(memory) as view:
        load_blocks(names, view, [position * SIZE for position in range(len(names))], SIZE, False)
    return [memory[position * SIZE : position * SIZE + 1] for position in range(len(names))]


def test_blocks_come_back_in_any_order(tmp_path, memory):
    one, two = paths(tmp_path, "one.bin", "two.bin")
    store(memory, [one, two], [b"1", b"2"])
    assert load(memory, [two, one]) == [b"2", b"1"]
    assert Path(one).stat().st_size == SIZE + SEAL


def test_a_file_that_exists_is_left_as_it_is(tmp_path, memory):
    (one,) = paths(tmp_path, "one.bin")
    store(memory, [one], [b"1"])
    store(memory, [one], [b"2"])
    assert load(memory, [one]) == [b"1"]


def test_those_before_the_first_fault_count(tmp_path, memory):
    names = paths(tmp_path, "one.bin", "two.bin", "three.bin")
    store(memory, names, [b"1", b"2", b"3"])
    os.truncate(names[2], SIZE)
    with pytest.raises(OSError, match="does not hold the bytes that were stored") as error:
        load(memory, names)
    assert error.value.num_succeeded == 2
    Path(names[0]).unlink()
    with pytest.raises(FileNotFoundError) as error:
        load(memory, names)
    assert error.value.num_succeeded == 0


def test_the_folder_of_another_layout_counts(tmp_path, memory):
    (one,) = paths(tmp_path, "one.bin")
    store(memory, [one], [b"1"])
    (tmp_path / "layout_r0").rename(tmp_path / "other_r0")
    with pytest.raises(OSError, match="does not hold the bytes that were stored"):
        load(memory, [one.replace("layout_r0", "other_r0")])
    assert not Path(one.replace("layout_r0", "other_r0")).exists()


def test_what_lies_outside_the_memory_is_an_error(tmp_path, memory):
    for offset in (-SIZE, 4 * SIZE, 3 * SIZE + 1):
        with memoryview(memory) as view, pytest.raises(ValueError, match="is outside"):
            store_blocks(paths(tmp_path, "one.bin"), view, [offset], SIZE, False)


def test_files_and_folders_are_for_this_user_only(tmp_path, memory):
    before = os.umask(0)
    try:
        store(memory, paths(tmp_path, "one.bin"), [b"1"])
    finally:
        os.umask(before)
    for path in (tmp_path / "layout_r0").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert stat.S_IMODE((tmp_path / "layout_r0").stat().st_mode) == 0o700


def test_a_block_that_does_not_fit_on_the_disk_leaves_no_file(tmp_path, memory):
    (one,) = paths(tmp_path, "one.bin")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))
    try:
        with pytest.raises(OSError, match="the disk is full, and the block was not written whole"):
            store(memory, [one], [b"1"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
