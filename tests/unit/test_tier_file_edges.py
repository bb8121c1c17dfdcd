"""Block files: the second in a folder, a moved root, direct I/O, and what stays open."""

import mmap
import os
import stat
from pathlib import Path

import pytest
from test_tier_files import SIZE, load, memory, paths, store  # noqa: F401

from kvpatch.patches.secondary_tiers import block_files


def test_later_files_of_a_folder_are_for_this_user_only_too(tmp_path, memory):  # noqa: F811
    one, two = paths(tmp_path, "one.bin", "two.bin")
    before = os.umask(0)
    try:
        store(memory, [one], [b"1"])
        store(memory, [two], [b"2"])
    finally:
        os.umask(before)
    assert [stat.S_IMODE(Path(path).stat().st_mode) for path in (one, two)] == [0o600, 0o600]


def test_a_tier_may_be_moved_as_a_whole(tmp_path, memory):  # noqa: F811
    (one,) = paths(tmp_path / "old", "one.bin")
    store(memory, [one], [b"1"])
    (tmp_path / "old").rename(tmp_path / "new")
    assert load(memory, paths(tmp_path / "new", "one.bin")) == [b"1"]


def test_the_last_block_of_the_memory_is_inside(tmp_path, memory):  # noqa: F811
    names = paths(tmp_path, "a.bin", "b.bin", "c.bin", "d.bin")
    store(memory, names, [b"1", b"2", b"3", b"4"])
    assert load(memory, names) == [b"1", b"2", b"3", b"4"]


def test_no_file_stays_open(tmp_path, memory):  # noqa: F811
    names = paths(tmp_path, "one.bin", "two.bin")
    before = len(list(Path("/proc/self/fd").iterdir()))
    store(memory, names, [b"1", b"2"])
    load(memory, names)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("given", "direct"), [((), True), ((True,), True), ((False,), False)], ids=str
)
def test_direct_io_is_the_default_and_only_where_it_is_wanted(
    tmp_path,
    memory,  # noqa: F811
    monkeypatch,
    given,
    direct,
):
    flag = os.O_APPEND  # stands for O_DIRECT on any disk
    monkeypatch.setattr(block_files, "_DIRECT", flag)
    seen = []
    real = os.open

    def opened(path, flags, *more, **by_name):
        if str(path).startswith(str(tmp_path)) and not flags & os.O_DIRECTORY:
            seen.append(bool(flags & flag))
        return real(path, flags, *more, **by_name)

    monkeypatch.setattr(os, "open", opened)
    (one,) = paths(tmp_path, "one.bin")
    with memoryview(memory) as view:
        block_files.replace_store(None)([one], view, [0], SIZE, *given)
        block_files.replace_load(None)([one], view, [0], SIZE, *given)
    assert set(seen) == {direct}
    assert len(seen) >= 2


def test_a_file_with_a_whole_seal_of_another_length_is_damaged(tmp_path, memory):  # noqa: F811
    (one,) = paths(tmp_path, "one.bin")
    store(memory, [one], [b"1"])
    os.truncate(one, SIZE + mmap.PAGESIZE // 2)
    with pytest.raises(OSError, match="does not hold the bytes that were stored"):
        load(memory, [one])
    assert not Path(one).exists()


def test_a_sweep_goes_by_the_age_of_a_link_and_not_of_what_it_leads_to(tmp_path):
    folder = tmp_path / block_files.TEMPORARY
    folder.mkdir()
    old = tmp_path / "old"
    old.touch()
    os.utime(old, (0, 0))
    (folder / "link").symlink_to(old)
    assert block_files.sweep(tmp_path) == 0
    assert (folder / "link").is_symlink()
