"""A status page by itself: its bytes, its file, and what a reader takes for a page."""

import json
import os
import stat
import time
import zlib
from pathlib import Path

import pytest
from fakes import raising

from kvpatch.environ import STATUS_DIR
from kvpatch.telemetry import status_page as page
from kvpatch.telemetry.status_page import Life, Page, Unreadable, Untrusted, Writer

PID = 4_000_000  # above every pid of Linux
START = 52  # bytes before the JSON


pytestmark = pytest.mark.usefixtures("place")


def opened():
    return len(list(Path("/proc/self/fd").iterdir()))


def raw(**changes):
    """The bytes of a page as kvpatch 0.1.0 writes it."""
    return of(json.dumps({"written": 1.0, "started": None} | changes).encode())


def of(body, pid=PID):
    head = page._HEAD.pack(b"KVPATCH\0", 1, b"0.1.0", pid)
    return head + page._BODY.pack(len(body), zlib.crc32(body)) + body


def test_a_page_is_what_other_versions_expect():
    before = opened()
    writer = Writer(PID, "0.1.0.dev1+a.very.long.local.part")
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600
    assert writer.path.stat().st_size == 65536
    assert writer.path == page.folder_of(os.getuid()) / f"{PID}.page"
    writer.write({"beats": False, "vllm": "0.28.0"})
    data = writer.path.read_bytes()
    assert data[:START].startswith(b"KVPATCH\0\1\0\0\0" + b"0.1.0.dev1+a.very.long.l")
    body = json.loads(data[START:].rstrip(b"\0"))
    assert body.pop("written") <= time.monotonic()
    assert body == {
        "beats": False,
        "vllm": "0.28.0",
        "started": None,  # of no process
        "namespace": page.namespace(),
    }
    read = page.read(writer.path)
    assert (read.pid, read.kvpatch) == (PID, "0.1.0.dev1+a.very.long.l")
    assert read.content["vllm"] == "0.28.0"
    del writer._map
    assert opened() == before
    writer.remove()
    assert not writer.path.exists()
    writer.remove()


def test_a_page_is_full_to_its_last_byte_and_keeps_what_it_had():
    writer = Writer(PID, "0.1.0")
    writer._started = 1
    writer.write({"text": ""})
    room = page.SIZE - len(writer.path.read_bytes().rstrip(b"\0"))
    page_time = page.time.monotonic

    def write(letters):
        # The clock's digits are part of what is written.
        now = page.read(writer.path).content["written"]
        page.time.monotonic = lambda: now
        try:
            writer.write({"text": "a" * letters})
        finally:
            page.time.monotonic = page_time

    write(room)
    assert page.read(writer.path).content["text"] == "a" * room
    with pytest.raises(ValueError, match="do not fit a status page"):
        write(room + 1)
    assert page.read(writer.path).content["text"] == "a" * room


def test_a_page_that_cannot_be_made_leaves_nothing(monkeypatch):
    before = opened()
    monkeypatch.setattr(page.os, "posix_fallocate", raising(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        Writer(PID, "0.1.0")
    assert list(page.own_folder().iterdir()) == []
    assert opened() == before


@pytest.mark.parametrize("kind", ["link", "garbage"])
def test_what_is_no_page_is_left_where_it_is(tmp_path, kind):
    path = page.own_folder() / f"{PID}.page"
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_bytes(raw(namespace=page.namespace()))
    else:
        path.write_bytes(b"garbage" * 99)
    assert Writer(PID, "0.1.0").path.name == f"{PID}-{page.namespace()}.page"
    assert path.is_symlink() or path.read_bytes().startswith(b"garbage")


@pytest.mark.parametrize(
    ("theirs", "ours", "name"),
    [
        (7, 7, f"{PID}.page"),
        (7, 8, f"{PID}-8.page"),
        (None, 8, f"{PID}-8.page"),
        (7, None, f"{PID}-0.page"),
        (None, None, f"{PID}-0.page"),
    ],
)
def test_the_page_of_another_namespace_stays(monkeypatch, theirs, ours, name):
    (page.own_folder() / f"{PID}.page").write_bytes(raw(namespace=theirs))
    monkeypatch.setattr(page, "namespace", lambda: ours)
    assert Writer(PID, "0.1.0").path.name == name


@pytest.mark.parametrize(
    ("theirs", "ours", "started", "life"),
    [
        (7, 7, 5, Life.RUNS),
        (7, 7, 6, Life.EXITED),
        (7, 7, None, Life.EXITED),
        (7, 8, 5, Life.FOREIGN),
        (None, 8, 5, Life.RUNS),
        (None, 8, 6, Life.FOREIGN),
        (7, None, 5, Life.RUNS),
        (7, None, 6, Life.FOREIGN),
        (None, None, 6, Life.FOREIGN),
    ],
)
def test_what_can_be_told_about_the_process(monkeypatch, theirs, ours, started, life):
    monkeypatch.setattr(page, "namespace", lambda: ours)
    monkeypatch.setattr(page, "start_ticks", lambda pid: started)
    assert page.life(Page(PID, "0.1.0", {"namespace": theirs, "started": 5})) is life


def test_the_age_of_a_page(monkeypatch):
    monkeypatch.setattr(page.time, "monotonic", lambda: 100.0)
    ages = [Page(PID, "", {"written": written}).age for written in (90, 99.5, 100, 130.0)]
    assert ages == [10, 0.5, 0, 0]


def test_a_folder_is_its_users_alone(place, monkeypatch):
    folder = page.own_folder()
    assert folder == page.own_folder() == place / f"kvpatch-status-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert page.checked(folder, os.getuid()) == folder
    for mode in (0o701, 0o710, 0o702, 0o777):
        folder.chmod(mode)
        with pytest.raises(Untrusted, match="is open to other users; remove it"):
            page.own_folder()
    folder.chmod(0o700)
    with pytest.raises(Untrusted, match="is not a folder of user 4711"):
        page.checked(folder, 4711)
    (place / "link").symlink_to(folder)
    (place / "file").touch(0o600)
    for name in ("link", "file"):
        with pytest.raises(Untrusted, match="is not a folder of this user"):
            page.checked(place / name, os.getuid())
    monkeypatch.delenv(STATUS_DIR.name)
    assert page.base() == Path("/dev/shm")


def test_a_file_is_read_in_its_users_folder_only(place):
    before = opened()
    path = page.own_folder() / "file"
    path.write_bytes(b"x" * 100)
    assert page.contents(path, 100) == b"x" * 100
    assert page.contents(path) == b"x" * 100
    with pytest.raises(Unreadable, match="is too large"):
        page.contents(path, 99)
    (place / "link").symlink_to(path.parent)
    with pytest.raises(OSError, match=r"link|directory"):
        page.contents(place / "link" / "file")
    (path.parent / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        page.contents(path.parent / "link")
    os.mkfifo(path.parent / "fifo")
    with pytest.raises(Unreadable, match="is not a file of user"):
        page.contents(path.parent / "fifo")
    assert opened() == before


def test_a_file_that_grows_while_it_is_read_is_cut(monkeypatch):
    path = page.own_folder() / "file"
    path.write_bytes(b"x" * 100)
    asked = os.fstat

    def fstat(file):
        found = asked(file)
        if stat.S_ISREG(found.st_mode):
            path.write_bytes(b"y" * 300)
        return found

    monkeypatch.setattr(page.os, "fstat", fstat)
    assert page.contents(path, 200) == b"y" * 200


def test_a_file_that_comes_in_parts_is_read_whole(monkeypatch):
    path = page.own_folder() / "file"
    path.write_bytes(bytes(range(100)))
    read = os.read
    monkeypatch.setattr(page.os, "read", lambda file, size: read(file, min(size, 7)))
    assert page.contents(path, 100) == bytes(range(100))


def reads(monkeypatch, *seen):
    """Read a page whose file is seen like this, one after the other; and how often was waited."""
    waited = []
    monkeypatch.setattr(page.time, "sleep", waited.append)
    left = list(seen)
    monkeypatch.setattr(page, "contents", lambda path: left.pop(0) if left[1:] else left[0])
    found = page.read(Path(f"/{PID}.page"))
    assert all(0 < seconds < 0.1 for seconds in waited)
    return found, len(waited)


WHOLE = raw(vllm="0.28.0")
WRITTEN_SINCE = WHOLE[: START - 8] + page._BODY.pack(3, 4) + WHOLE[START:]
NO_HEAD = bytes(START) + WHOLE[START:]
NO_BODY = WHOLE[: START - 8] + bytes(100)


@pytest.mark.parametrize("seen", [b"", b"KVPATCH\0", bytes(200), NO_HEAD, NO_BODY, WRITTEN_SINCE])
def test_a_page_that_is_being_written_is_read_again(monkeypatch, seen):
    found, waited = reads(monkeypatch, seen, seen, WHOLE + bytes(99))
    assert (found.pid, found.kvpatch, found.content["vllm"]) == (PID, "0.1.0", "0.28.0")
    assert waited == 2
    with pytest.raises(Unreadable, match=r"is not a status page; rm /4000000\.page removes it"):
        reads(monkeypatch, seen)


def test_what_never_was_a_page_is_not_waited_for(monkeypatch):
    with pytest.raises(Unreadable, match="is not a status page"):
        reads(monkeypatch, b"x" * 99, WHOLE)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (of(b"{"), "that this kvpatch can read: "),
        (of(b"[" * 60_000), "that this kvpatch can read: "),
        (of(b"{}"), "written is missing"),
        (of(b"{}", PID + 1), f"is not the status page of its name, but of pid {PID + 1}"),
    ],
)
def test_a_page_with_another_content_is_none(monkeypatch, data, words):
    with pytest.raises(Unreadable, match=words):
        reads(monkeypatch, data)
