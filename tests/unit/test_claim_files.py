"""The files of claims: what is in them, what is removed with them, and that none stays open."""

import errno
import fcntl
import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import raising

from kvpatch import claims, private
from kvpatch.refusal import Refusal


@pytest.fixture(autouse=True)
def shm(tmp_path, monkeypatch):
    """A folder in the place of /dev/shm."""
    monkeypatch.setattr(claims, "BASE", tmp_path)
    return tmp_path


def killed(**covered):
    """Leave the claims of processes that are killed, by their names, each with what it covered."""
    children = []
    for name, files in covered.items():
        read, write = os.pipe()
        children.append(os.fork())
        if children[-1] == 0:
            claim = claims.take("pool", name)
            claim.cover(*files)
            os.write(write, b"x")
            signal.pause()
        os.read(read, 1)
        os.close(read)
        os.close(write)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def opened():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_call_leaves_a_file_open():
    claims.take("pool", "first").release()
    before = opened()
    for _ in range(3):
        killed(gone=[])
        claim = claims.take("pool", "chat")
        with pytest.raises(claims.Taken):
            claims.take("pool", "chat")
        assert claims.held("pool", "chat")
        assert not claims.held("pool", "another")
        claim.release()
    assert opened() == before


def test_the_name_of_a_file_is_the_same_in_every_release_of_kvpatch():
    """Two engines of one machine need not have the same one."""
    claims.take("tier", "a/b_c-9 Δ").release()
    made = claims.take("tier", "a/b_c-9 Δ" + 70 * "x")
    (path,) = claims.folder().iterdir()
    assert path.name == f"tier-a-b_c-9-Δ{55 * 'x'}-ac937dcf42e69767"
    made.release()


def test_all_files_of_all_killed_engines_go_with_the_next_start(shm):
    names = [f"{engine}{number}" for engine in "ab" for number in range(3)]
    for name in names:
        (shm / name).touch()
    killed(a=names[:3], b=names[3:])
    assert len(list(claims.folder().iterdir())) == 2
    claims.take("pool", "next").release()
    assert [name for name in names if (shm / name).exists()] == []
    assert list(claims.folder().iterdir()) == []


@pytest.mark.parametrize("many_files_open", [False, True])
def test_the_memory_of_killed_engines_is_freed_after_the_lock(shm, monkeypatch, many_files_open):
    (shm / "tier").touch()
    killed(gone=["tier"])
    alone, left, before = private.alone, [], opened()

    @contextmanager
    def watched(home, lock):
        with alone(home, lock):
            yield
        left.append(((shm / "tier").exists(), held_open("tier")))

    def open_few(path, flags, *more):
        if flags & os.O_PATH:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return os_open(path, flags, *more)

    monkeypatch.setattr(private, "alone", watched)
    os_open = os.open
    with monkeypatch.context() as limited:
        if many_files_open:
            limited.setattr(os, "open", open_few)
        claim = claims.take("pool", "next")
    assert left == [(False, 0 if many_files_open else 1)]
    assert held_open("tier") == 0
    claim.release()
    assert opened() == before


def held_open(name):
    """How many open files of this process had the name and have none."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the list itself
            found += str(file.readlink()).endswith(f"/{name} (deleted)")
    return found


def test_what_is_covered_later_is_covered_too(shm):
    names = ["pool", "queue 1", "queue 2"]
    for name in names:
        (shm / name).touch()
    claim = claims.take("pool", "chat")
    claim.cover(names[0])
    claim.cover(*names[1:])
    claim.release()
    assert [name for name in names if (shm / name).exists()] == []


@pytest.mark.parametrize("said", ["", "1", "? {namespace}", "1 elsewhere x"])
def test_a_claim_that_does_not_tell_whose_it_is(said):
    """/dev/shm may have been full when it was written."""
    claim = claims.take("pool", "chat")
    (path,) = claims.folder().iterdir()
    path.write_text(said.format(namespace=claims._pid_namespace()))
    with pytest.raises(claims.Taken) as taken:
        claims.take("pool", "chat")
    assert (taken.value.pid, taken.value.holder) == (None, "another engine")
    claim.release()
    assert not path.exists()


def test_a_full_shm_has_no_room_for_a_claim(shm, monkeypatch):
    monkeypatch.setattr(claims, "take", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(Refusal) as refused:
        claims.hold(SimpleNamespace(), "pool", "chat")
    assert refused.value.code == "KVP417"
    assert f"{claims.folder()} cannot be made" in str(refused.value)


def test_another_users_folder_is_looked_at_without_his_lock(shm, monkeypatch):
    """He may hold it for ever."""
    claim = claims.take("pool", "theirs")
    theirs = claims.folder()
    monkeypatch.setattr(claims, "folder", lambda: shm / "ours")
    claims.take("pool", "ours")  # not dropped: nothing keeps it
    lock = os.open(theirs, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    signal.alarm(20)  # where it waits
    try:
        assert claims.held("pool", "theirs", theirs)
        assert not claims.held("pool", "theirs")
        assert not claims.held("pool", "ours", theirs)
    finally:
        signal.alarm(0)
        os.close(lock)
    claim.release()


def test_ones_own_folder_is_looked_at_while_nothing_changes_there(monkeypatch):
    claim = claims.take("pool", "chat")
    alone, asked = private.alone, []
    monkeypatch.setattr(
        private, "alone", lambda home, lock: asked.append(home) or alone(home, lock)
    )
    assert claims.held("pool", "chat")
    assert asked == [claims.folder()]
    claim.release()


def test_a_link_in_the_place_of_a_claim_is_not_followed(shm):
    claim = claims.take("pool", "chat")
    (path,) = claims.folder().iterdir()
    path.rename(shm / "elsewhere")
    path.symlink_to(shm / "elsewhere")
    assert not claims.held("pool", "chat")
    path.unlink()
    claim.release()


def test_what_a_link_among_the_claims_leads_to_covers_nothing(shm):
    claims.take("pool", "first").release()
    (shm / "elsewhere").write_text("1 namespace victim")
    (shm / "victim").touch()
    (claims.folder() / "link").symlink_to(shm / "elsewhere")
    claims.take("pool", "chat").release()
    assert (shm / "victim").exists()


def test_a_folder_has_one_user_at_a_time_and_a_forked_copy_of_the_lock_is_none():
    claims.take("pool", "chat").release()
    home = claims.folder()
    other = os.open(home, os.O_RDONLY)
    with private.alone(home, private.within(1)):
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        copies = [os.dup(number) for number in range(3, other + 10) if is_open(number, home)]
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for file in (other, *copies):
        os.close(file)


def is_open(number, path):
    with suppress(OSError):
        return os.path.samestat(os.fstat(number), path.stat())
    return False


@pytest.fixture
def stopped(shm, monkeypatch):
    """A process that keeps the folder of claims locked and is stopped; gone at the end."""
    claim = claims.take("pool", "chat")
    monkeypatch.setattr(claims, "TO_TAKE", 0.2)
    monkeypatch.setattr(claims, "TO_LOOK", 0.1)
    child = os.fork()
    if child == 0:
        fcntl.flock(os.open(claims.folder(), os.O_RDONLY), fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    signal.alarm(20)  # where it is waited for
    yield claim
    signal.alarm(0)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_stopped_process_with_the_lock_does_not_keep_an_engine_waiting(stopped):
    core = SimpleNamespace()
    with pytest.raises(Refusal) as refused:
        claims.hold(core, "pool", "another")
    home = claims.folder()
    assert str(refused.value) == (
        f"kvpatch refuses to start vLLM: the folder of claims {home} cannot be used, because a "
        "process that is stopped or hangs has kept it locked for 0.2 s; continue or end that "
        f"process (fuser -v {home}), or set KVPATCH=0. [KVP419]"
    )


def test_a_stopped_process_with_the_lock_hides_no_claim_and_keeps_no_engine_from_its_end(stopped):
    assert claims.held("pool", "chat")
    assert not claims.held("pool", "another")
    copy = os.dup(stopped._file)  # as a forked worker has it
    stopped.release()
    assert not claims.held("pool", "chat")
    os.close(copy)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_the_lock_is_a_folders(shm, kind):
    claims.take("pool", "chat").release()
    place = shm / "place"
    if kind == "link":
        place.symlink_to(claims.folder())
    else:
        place.touch()
    with pytest.raises(OSError), private.alone(place, private.within(1)):
        pass


def test_a_claim_whose_file_cannot_be_removed_is_released_nevertheless(monkeypatch):
    claim = claims.take("pool", "chat")
    copy = os.dup(claim._file)  # as a forked worker has it
    fails = raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    with monkeypatch.context() as many_files_open:
        many_files_open.setattr(private, "alone", fails)
        claim.release()
    assert not claims.held("pool", "chat")
    os.close(copy)
    claims.take("pool", "chat").release()
