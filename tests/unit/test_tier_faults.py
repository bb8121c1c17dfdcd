"""Every call of a tier to the disk made to fail in turn: a fault is a miss and nothing else."""

import errno
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import test_tier_files
from fakes import raising
from test_tier_files import SIZE

from kvpatch.patches.secondary_tiers import block_files
from kvpatch.patches.secondary_tiers.block_files import own_folder, sweep

CONTENTS = [b"1", b"2", b"3"]
BLOCKS = len(CONTENTS)
CALLS = ("open", "writev", "readv", "close", "fstat", "rename", "replace", "unlink", "mkdir")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOENT, errno.ESTALE)

CALLS_OF_PATHS = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="pathlib of 3.10 keeps the calls of os that it began with"
)


class Disk:
    """Counts the calls to the disk, and makes one of them fail, with or without an effect.

    Attributes:
        failing: the number of the call that fails; 0 for none.
        done: whether it has an effect before it fails, as one whose answer was lost.
    """

    def __init__(self, monkeypatch, error):
        self.calls = []
        self.failing = 0
        self.done = False
        self.error = error
        for name in CALLS:
            monkeypatch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name, call):
        def counted(*args, **kwargs):
            self.calls.append(name)
            if len(self.calls) != self.failing:
                return call(*args, **kwargs)
            if self.done or name == "close":  # what could not be closed is closed
                call(*args, **kwargs)
            raise OSError(self.error, f"{name} failed", str(args[0]))

        return counted

    def fail(self, number, done):
        self.calls.clear()
        self.failing, self.done = number, done


@pytest.fixture(params=ERRORS, ids=errno.errorcode.get)
def disk(request, monkeypatch):
    return Disk(monkeypatch, request.param)


def names(folder):
    return [str(folder / f"layout_r0/00{n}/00_g0/{n}.bin") for n in range(BLOCKS)]


def store(folder):
    test_tier_files.store(names(folder), CONTENTS)


def load(folder):
    """Load all blocks; how many came, each of which is what was stored."""
    came, _ = test_tier_files.loaded(names(folder))
    assert came == CONTENTS[: len(came)]
    return len(came)


def calls_of(disk, act):
    disk.fail(0, False)
    act()
    return len(disk.calls)


@CALLS_OF_PATHS
@pytest.mark.parametrize("done", [False, True], ids=["without effect", "with its effect"])
def test_a_store_that_fails_at_any_call_leaves_nothing_wrong(disk, tmp_path, done):
    count = calls_of(disk, lambda: store(tmp_path / "0"))
    assert {"open", "writev", "close", "mkdir"} <= set(disk.calls)
    assert count > 4 * BLOCKS
    for number in range(1, count + 1):
        folder = tmp_path / str(number)
        disk.fail(number, done)
        with suppress(OSError):
            store(folder)
        disk.fail(0, False)
        load(folder)  # what is there is right
        for file in folder.rglob("*"):  # and nothing is there in part
            assert file.is_dir() or file.suffix == ".bin", (number, file)
        store(folder)
        assert load(folder) == BLOCKS


@pytest.mark.parametrize("done", [False, True], ids=["without effect", "with its effect"])
def test_a_load_that_fails_at_any_call_is_a_miss(disk, tmp_path, done):
    store(tmp_path)
    count = calls_of(disk, lambda: load(tmp_path))
    assert count == 4 * BLOCKS
    for number in range(1, count + 1):
        disk.fail(number, done)
        assert load(tmp_path) == (number - 1) // 4
        disk.fail(0, False)
        store(tmp_path)
        assert load(tmp_path) == BLOCKS


def test_a_damaged_file_that_cannot_be_removed_is_a_miss(disk, tmp_path):
    store(tmp_path)
    os.truncate(names(tmp_path)[1], SIZE)
    count = calls_of(disk, lambda: load(tmp_path))
    store(tmp_path)
    for number in range(1, count + 1):
        os.truncate(names(tmp_path)[1], SIZE)
        disk.fail(number, False)
        assert load(tmp_path) <= 1
        disk.fail(0, False)
        assert load(tmp_path) <= 1
        store(tmp_path)
        assert load(tmp_path) == BLOCKS


@CALLS_OF_PATHS
def test_a_sweep_that_fails_at_any_call_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(block_files, "ABANDONED", -3600.0)
    abandoned = tmp_path / block_files.TEMPORARY / "x.bin.00"
    abandoned.parent.mkdir()
    for name in ("scandir", "unlink"):
        abandoned.touch()
        with monkeypatch.context() as patched:
            patched.setattr(os, name, raising(OSError(errno.EIO, "the disk failed")))
            assert sweep(tmp_path) == 0
    assert sweep(tmp_path) == 1


def test_files_that_nobody_writes_any_more_are_swept(tmp_path):
    assert sweep(tmp_path) == 0
    folder = tmp_path / block_files.TEMPORARY
    folder.mkdir()
    for name, age in (("old", block_files.ABANDONED + 60), ("new", 0.0)):
        (folder / name).touch()
        then = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (then, then))
    (tmp_path / "block.bin").touch()
    os.utime(tmp_path / "block.bin", (0, 0))
    (folder / "link").symlink_to(tmp_path / "block.bin")  # itself it is new
    assert sweep(tmp_path) == 1
    left = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert left == {"new", "link", "block.bin"}


def test_a_block_is_never_seen_in_part(tmp_path, monkeypatch):
    """While a file is written it has another name, in another folder."""
    seen = []
    writev = os.writev

    def watched(file, parts):
        seen.append((list(tmp_path.rglob("*.bin")), len([*(tmp_path / "layout_r0/tmp").iterdir()])))
        return writev(file, parts)

    monkeypatch.setattr(os, "writev", watched)
    store(tmp_path)
    assert [(len(whole), partial) for whole, partial in seen] == [(n, 1) for n in range(BLOCKS)]
    assert list((tmp_path / "layout_r0/tmp").iterdir()) == []


def test_every_block_is_an_answer_of_the_disk(tmp_path, monkeypatch):
    """A job of many blocks on a slow disk takes longer than the disk may be silent."""
    answers = []
    monkeypatch.setattr(block_files, "progressed", lambda size: answers.append(len(answers)))
    for act in (store, load, store):  # the last finds all files there
        act(tmp_path)
        assert len(answers) == BLOCKS
        answers.clear()


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o770, 0o777, 0o1777, 0o750])
def test_a_folder_that_others_can_open_is_none_of_ours(tmp_path, mode):
    folder = tmp_path / "layout_r0"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="is open to other users"):
        own_folder(folder)
    assert folder.stat().st_mode & 0o7777 == mode  # and is not repaired


def test_a_link_in_the_place_of_a_folder_is_none_of_ours(tmp_path):
    (tmp_path / "elsewhere").mkdir(0o700)
    (tmp_path / "layout_r0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is a link"):
        own_folder(tmp_path / "layout_r0")


def test_a_folder_of_another_user_is_none_of_ours(tmp_path, monkeypatch):
    (tmp_path / "layout_r0").mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(PermissionError, match=f"belongs to the user id {os.getuid()}"):
        own_folder(tmp_path / "layout_r0")


@contextmanager
def link(file, monkeypatch):
    """To the file itself, which another user has moved who can write to the folder."""
    file.symlink_to(file.rename(file.parents[3] / "moved"))
    yield


@contextmanager
def file_of_another_user(file, monkeypatch):
    """Whatever its checksum: one over a name that everybody knows proves no author."""
    there, fstat = file.stat(), os.fstat

    def whose(descriptor):
        found = fstat(descriptor)
        if found.st_ino != there.st_ino:
            return found
        return os.stat_result((*found[:4], 4711, *found[5:]))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", whose)
        yield


@contextmanager
def pipe(file, monkeypatch):
    """Out of which comes what was stored."""
    stored = file.read_bytes()
    file.unlink()
    os.mkfifo(file, 0o600)
    end = os.open(file, os.O_RDWR)
    assert os.write(end, stored) == len(stored)
    yield
    os.close(end)


@pytest.mark.parametrize("other", [link, file_of_another_user, pipe])
def test_what_is_no_file_of_ours_is_a_miss_and_is_removed(tmp_path, monkeypatch, other):
    store(tmp_path)
    file = Path(names(tmp_path)[1])
    with other(file, monkeypatch):
        assert load(tmp_path) == 1
        assert not os.path.lexists(file)
    assert other is not link or (tmp_path / "moved").exists()
    store(tmp_path)
    assert load(tmp_path) == BLOCKS


def test_a_folder_in_the_place_of_a_file_is_a_miss(tmp_path):
    store(tmp_path)
    file = Path(names(tmp_path)[1])
    file.unlink()
    file.mkdir()
    for _ in range(2):
        assert load(tmp_path) == 1
        store(tmp_path)


def test_a_dangling_link_is_not_written_through(tmp_path):
    file = Path(names(tmp_path)[0])
    file.parent.mkdir(parents=True)
    file.symlink_to(tmp_path / "target")
    store(tmp_path)
    assert not (tmp_path / "target").exists()
    assert load(tmp_path) == 0
    store(tmp_path)
    assert load(tmp_path) == BLOCKS
