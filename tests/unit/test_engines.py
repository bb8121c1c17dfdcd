"""The table of ``kvpatch status``, what ended with its server, and rates: no engine."""

import os
import re
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from kvpatch import cli
from kvpatch.cli import engines
from kvpatch.cli import status as command
from kvpatch.cli.columns import columns
from kvpatch.environ import STATUS_DIR
from kvpatch.telemetry import port, publisher, reader, refusals
from kvpatch.telemetry import status_page as page
from kvpatch.telemetry.reader import State

GONE = 4_000_000  # above every pid of Linux
WITH_ITS_SERVER = (
    rf"pid {GONE + 1} ended with its server, or before it \(its log says\), "
    r"last seen \d+ s ago: chat"
)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv(STATUS_DIR.name, str(tmp_path))
    return tmp_path


def engine(**changes):
    device = {
        "page_bytes": 8 << 20,
        "mapped_pages": 5,
        "reserved_pages": 1,
        "total_pages": 16,
    }
    return {
        "model": "meta-llama/Llama-3.1-8B",
        "pool": "chat",
        "requests": {"running": 3, "waiting": 1},
        "steps": 7,
        "since_step": 0.2,
        "device": device,
        "zero_page_bytes": 8 << 20,
        "fence": None,
        "tier": {"used_blocks": 56, "total_blocks": 2048},
        "connector": "OffloadingConnector",
        "bytes": {"stored": 0, "loaded": 0},
        "rates": {"stored": 3 << 20, "loaded": 1 << 20},
        "operations": {"stored": 0, "loaded": 0, "dropped": 0, "skipped": 0},
        "hits": {"device": 45, "tier": 30},
        "queries": {"device": 100, "tier": 50},
    } | changes


def publish(pid, roles=("engine-core",), **changes):
    """The page of a process; of this one, of a dead one, or of another namespace."""
    writer = page.Writer(pid, "0.1.0")
    if "namespace" in changes:
        writer._namespace = changes.pop("namespace")
    content = {"vllm": "vllm 0.28.0", "roles": list(roles), "elastic": True, "features": {}}
    writer.write(content | changes)
    return writer.path


def out(capsys, *options):
    code = cli.main(["status", *options])
    return code, capsys.readouterr().out


# One line an engine


def test_an_engine_is_one_line(capsys):
    """Two processes of one engine had two blocks of 270 characters each."""
    publish(os.getpid(), engine=engine(), beats=True)
    worker = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        publish(worker.pid, ("worker",), beats=False)
        code, text = out(capsys)
    finally:
        worker.communicate()
    assert code == 0
    head, line = text.splitlines()
    assert tuple(head.split()) == tuple(" ".join(engines.HEAD).split())
    cells = "chat - Llama-3.1-8B runs 3 1 56 MiB 40 MiB 8 MiB 0 B 128 MiB 56/2048 3 MiB 1 MiB"
    *told, age, unit, ago = line.split()
    assert told == [str(os.getpid()), *cells.split(), "45/30/25", "%"]
    assert age.isdecimal()
    assert (unit, ago) == ("s", "ago")


@pytest.mark.parametrize("width", [100, 140])
def test_a_terminal_gets_the_columns_that_fit(width, capsys, monkeypatch):
    """On 140 columns the head of the last one was cut."""
    publish(os.getpid(), engine=engine(), beats=True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    _, text = out(capsys)
    head, line, left_out = text.splitlines()
    assert max(len(head), len(line)) <= width
    assert {"PID", "NAME", "STATE", "WAIT", "DEVICE", "LIMIT"} <= set(head.split())
    assert "STEP" not in head
    assert left_out.startswith("(this terminal is too narrow for STEP")
    assert len(head.split()) == len(line.replace(" MiB", "").split()) or "HITS" in head


def test_a_dumb_terminal_gets_whole_columns(monkeypatch):
    """rich made columns for 80 characters, of cut words."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    lines = [("word" * 20, "word" * 20), ("a", "b")]
    assert columns(lines).splitlines()[0] == "  ".join(lines[0])
    assert len(columns(lines).splitlines()) == 2


def test_every_page_that_the_device_is_charged_for_is_counted():
    """Mapped and reserved were 48 MiB, the host device's ledger said 56: the zero page."""
    assert engines.charged(engine()) == (5 + 1 + 1) * (8 << 20)


def test_a_page_of_an_older_build_has_gaps_and_no_error(capsys):
    publish(os.getpid(), engine={}, beats=True)
    assert out(capsys) == (
        1,
        f"no engine yet: 1 with kvpatch on (pid {os.getpid()}); -v says more\n",
    )
    assert out(capsys, "--pid", str(os.getpid()))[0] == 0
    publish(os.getpid(), engine={"steps": 3}, beats=True)
    _, text = out(capsys)
    assert text.splitlines()[1].split()[1:5] == ["-", "-", "-", "runs"]


@pytest.mark.parametrize(
    ("changes", "more", "shown", "hidden"),
    [
        ({"pool": "\x1b[2J", "model": "\x1b]0;x"}, {}, "\\x1b[2J", "\x1b"),
        ({"off": "broken"}, {"elastic": False}, "runs, not elastic, not counted", "45/30"),
    ],
    ids=["no cell controls the terminal", "not elastic, not counted"],
)
def test_what_a_line_shows(capsys, changes, more, shown, hidden):
    publish(os.getpid(), engine=engine(**changes), beats=True, **more)
    _, text = out(capsys)
    assert shown in text
    assert hidden not in text


def test_what_does_not_run_has_its_sentence_below(capsys):
    waiting = engine(requests={"running": 0, "waiting": 2}, waits=45.0)
    publish(os.getpid(), engine=waiting, beats=True)
    code, text = out(capsys)
    assert code == 1
    _, line, sentence = text.splitlines()
    assert " waits " in line
    assert sentence.startswith(f"pid {os.getpid()} waits for memory")


def test_old_refusals_are_told_on_demand(capsys, monkeypatch):
    publish(os.getpid(), engine=engine(), beats=True)
    refusals.remember("kvpatch refuses to start vLLM: because.")
    now = command.time.time()
    assert "last refusals" in out(capsys)[1]
    monkeypatch.setattr(command.time, "time", lambda: now + command.RECENT + 1)
    assert "last refusals" not in out(capsys)[1]
    assert "last refusals" in out(capsys, "-v")[1]


# Another container's


def test_another_containers_engine_is_foreign(capsys):
    """It was listed as an engine that is gone, with a line that removes its files."""
    publish(os.getpid(), engine=engine(), beats=True)
    publish(GONE, engine=engine(pool="theirs"), beats=True, namespace=7)
    code, text = out(capsys)
    assert code == 0
    assert any("theirs" in line and "foreign" in line for line in text.splitlines())
    assert "1 process of other containers that share this folder" in text
    assert "rm " not in text


# A stop that was asked for


def ended(**frontend):
    """The pages of an engine and its worker that vLLM killed when it stopped."""
    server = {"pid": GONE, "started": 17}
    publish(GONE + 1, engine=engine(), beats=True, server=server)
    publish(GONE + 2, ("worker",), beats=False, server={"pid": GONE + 1, "started": None})
    if frontend:
        writer = page.Writer(GONE, "0.1.0")
        writer._started = frontend["started"]
        writer.write({"roles": ["frontend"], "beats": False})


def test_a_stop_that_was_asked_for_is_none_of_a_crash(capsys):
    """vLLM kills its engines when it is stopped: status said "killed?" for ever, and ended 1."""
    ended()
    publish(os.getpid(), engine=engine(), beats=True)
    states = {seen.pid: seen.state for seen in reader.all_of(False)}
    assert states[GONE + 1] is states[GONE + 2] is State.ENDED
    code, text = out(capsys)
    assert code == 0
    (line,) = text.splitlines()[2:]
    assert re.fullmatch(WITH_ITS_SERVER, line)


@pytest.mark.parametrize("killed", [False, True])
def test_a_worker_that_had_a_page_before_its_engine_ends_with_the_server(killed):
    """No engine had a page when the worker asked for it: it was "killed?" after every stop."""
    ended(**({"started": 17} if killed else {}))
    parent = {"pid": GONE + 1, "started": None}
    publish(GONE + 3, ("worker",), beats=False, server=None, parent=parent)
    assert reader.one(GONE + 3).state is (State.KILLED if killed else State.ENDED)


SERVER = """
import os, signal, subprocess, sys
from kvpatch.telemetry import publisher
publisher.process(lambda: {"roles": [sys.argv[1]]})
if sys.argv[1] == "frontend":
    from threading import Thread
    from kvpatch.patches.metrics import hooks
    from types import SimpleNamespace as Object
    code = -9 if sys.argv[2] == "has lost it" else 0
    client = Object(resources=Object(engine_manager=Object(processes=[Object(exitcode=code)])))
    shutdown = lambda: hooks.around_client_shutdown(print, client, (), {"end": ""})
    engine = subprocess.Popen([sys.executable, "-c", os.environ["CODE"], "engine"], stdout=-1)
    engine.stdout.readline()
    engine.kill()  # as vLLM does, and the OOM killer
    engine.wait()
    thread = "MainThread" if sys.argv[2] == "ends" else hooks.WATCHES
    of_client = Thread(target=shutdown, name=thread)
    of_client.start()
    of_client.join()
    print(engine.pid, flush=True)
    if sys.argv[2] == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
else:
    print("here", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("ends", State.ENDED),
        ("gets its signal later", State.ENDED),
        ("is killed", State.KILLED),
        ("has lost it", State.KILLED),
    ],
)
def test_an_engine_that_died_is_told_from_one_that_was_stopped(how, state):
    command = [sys.executable, "-c", SERVER, "frontend", how]
    environment = os.environ | {"KVPATCH": "0", "CODE": SERVER}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    engine = int(done.stdout)
    assert (done.returncode == 0) is (how != "is killed"), done.stderr
    assert reader.one(engine).state is state
    lines = [seen.line for seen in reader.all_of(False) if seen.pid != engine]
    assert any("ended because its engine had died" in one for one in lines) is (
        how == "has lost it"
    )


def test_a_server_that_was_killed_too_is_one(capsys):
    """As by the OOM killer of its container: the frontend's page is still there."""
    ended(started=17)
    states = {seen.pid: seen.state for seen in reader.all_of(False)}
    assert set(states.values()) == {State.KILLED}
    assert out(capsys)[0] == 1


def test_a_later_process_of_the_servers_number_is_not_the_server():
    ended(started=18)
    (seen,) = (seen for seen in reader.all_of(False) if seen.pid == GONE + 1)
    assert seen.state is State.ENDED


def test_an_engine_whose_server_runs_was_killed():
    server = {"pid": os.getpid(), "started": page.start_ticks(os.getpid())}
    publish(os.getpid(), ("frontend",), beats=False)
    publish(GONE, engine=engine(), beats=True, server=server)
    assert reader.one(GONE).state is State.KILLED


def test_what_has_no_server_was_killed():
    """A parent that never had a page is none: whoever starts a server from a shell."""
    publish(GONE, engine=engine(), beats=True, server=None)
    shell = {"pid": 1, "started": 5}
    publish(GONE + 1, ("frontend",), beats=False, server=None, parent=shell)
    assert {reader.one(pid).state for pid in (GONE, GONE + 1)} == {State.KILLED}


def test_the_page_of_a_killed_server_may_have_the_longer_name():
    """A container that shares the folder has a process of the same number."""
    publish(GONE, ("frontend",), beats=False, namespace=1)
    ended(started=17)
    assert len(list(page.own_folder().glob(f"{GONE}*.page"))) == 2
    assert page.of_process(page.own_folder(), GONE)[1].content["started"] == 17
    assert reader.one(GONE + 1).state is State.KILLED


def test_a_page_of_the_servers_number_that_cannot_be_read_is_not_the_servers():
    (page.own_folder() / f"{GONE}.page").write_bytes(b"no page")
    ended()
    assert reader.one(GONE + 1).state is State.ENDED


def test_processes_that_name_each_other_as_their_servers_were_killed():
    for pid, other in ((GONE, GONE + 1), (GONE + 1, GONE)):
        publish(pid, beats=True, server={"pid": other, "started": None})
        assert reader.one(pid).state is (State.ENDED if pid == GONE else State.KILLED)
    assert reader.one(GONE).state is State.KILLED


def test_what_a_suspension_lost_is_said_afterwards(capsys):
    last = {"blocks": 125, "kept": 80}
    line = (
        "its last suspension kept 80 of 125 blocks, and lost 45, which are computed again when "
        "asked for"
    )
    publish(os.getpid(), beats=True, engine=engine(last_suspension=last))
    assert f"\nchat: {line}\n" in out(capsys)[1]
    assert f"suspended {line}\n" in out(capsys, "-v")[1]
    publish(os.getpid(), beats=True, engine=engine(last_suspension=last | {"kept": 125}))
    assert "last suspension" not in out(capsys)[1]
    assert "kept 125 of 125 blocks\n" in out(capsys, "-v")[1]


def test_pages_of_other_containers_do_not_hide_that_nothing_runs_here(capsys):
    publish(GONE, namespace=1)
    text = out(capsys)[1]
    assert text.startswith(
        "no process that can be seen from here has kvpatch on\n1 process of other"
    )
    publish(os.getpid(), beats=True, engine=engine())
    assert "no process" not in out(capsys)[1]


def test_nothing_runs_after_a_stop(capsys, monkeypatch):
    ended()
    code, text = out(capsys)
    assert code == 1
    line = text.removesuffix("\n")
    assert re.fullmatch(WITH_ITS_SERVER, line)
    monkeypatch.setattr(engines, "SHOWN", -1.0)
    assert "no process with kvpatch on publishes in" in out(capsys)[1]


def test_the_page_of_a_killed_server_is_kept_as_long_as_its_engines(monkeypatch):
    """A frontend writes its page once: an hour later it was swept before the engine's."""
    ended(started=17)
    old = page.read(page.own_folder() / f"{GONE}.page")
    ages = {GONE: publisher.FORGOTTEN + 1.0}
    monkeypatch.setattr(page.Page, "age", property(lambda self: ages.get(self.pid, 0.0)))
    publisher.sweep(page.own_folder())
    assert reader.one(GONE + 1).state is State.KILLED
    ages |= {GONE + 1: ages[GONE], GONE + 2: ages[GONE]}
    publisher.sweep(page.own_folder())
    assert list(page.own_folder().glob("*.page")) == []
    assert old.pid == GONE


def test_a_process_says_what_started_it():
    assert publisher.server() is None
    publish(os.getppid(), ("frontend",), beats=False)
    assert publisher.server() == {
        "pid": os.getppid(),
        "started": page.start_ticks(os.getppid()),
    }


def test_the_engine_of_a_server_is_found_before_its_first_message():
    server = {"pid": os.getpid(), "started": 1}
    publish(os.getpid(), engine=engine(), beats=True, server=server)
    (found,) = reader.engines_of((os.getpid(), 1))
    assert found.content["engine"]["pool"] == "chat"
    assert reader.engines_of((1,)) == []


def test_the_engine_of_a_program_without_a_server_is_found():
    """``LLM`` with its engine in the same process has no server, and a page of its own."""
    publish(os.getpid(), engine=engine(), beats=True)
    (found,) = reader.engines_of((os.getpid(), 1))
    assert found.pid == os.getpid()


# Rates


def test_rates_are_of_the_last_seconds(monkeypatch):
    now = SimpleNamespace(at=100.0)
    monkeypatch.setattr(publisher.time, "monotonic", lambda: now.at)
    rates = publisher.Rates()

    def after(seconds, stored):
        now.at += seconds
        return rates.of({"bytes": {"stored": stored, "loaded": 0}})["rates"]["stored"]

    assert after(0, 0) == 0
    assert after(0.5, 1000) == 1000 / 5  # and not 2000 a second
    assert after(9.5, 2000) == 200
    assert after(20, 2000) == 0
    assert rates.of({"bytes": {"stored": 5, "loaded": 0}}) == {}  # another engine
    assert rates.of({}) == {}


# Ports


@pytest.mark.parametrize(
    ("listening", "words", "found"),
    [
        ({8000, 41000}, ["vllm", "serve"], 8000),
        ({8100, 41000}, ["vllm", "serve", "--port", "8100"], 8100),
        ({8100, 41000}, ["vllm", "serve", "--port=8100"], 8100),
        ({41000}, ["vllm", "serve", "--port", "8100"], 41000),
        ({41000, 41001}, ["vllm", "serve", "--port"], None),
        (set(), ["python"], None),
    ],
)
def test_which_of_its_ports_a_server_answers_on(listening, words, found):
    assert port.among(listening, words) == found


def test_the_port_of_a_process_that_listens():
    before = port.of(os.getpid())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert port.of(os.getpid()) in (listener.getsockname()[1], before)
    assert port.of(GONE) is None


# Drawing in place


DRAW = """
import sys
from kvpatch.cli.screen import Screen
with Screen() as screen:
    screen.draw("one\\ntwo")
    print("waits", flush=True)
    print("left" if screen.quits(600) else "stayed", flush=True)
"""


def in_a_terminal(command, sign):
    """Run a command in a terminal, press q when it has shown ``sign``; return what it showed."""
    ours, theirs = os.openpty()
    done = subprocess.Popen(command, stdin=theirs, stdout=theirs)
    os.close(theirs)
    seen, told = b"", threading.Event()
    try:
        while True:
            try:
                seen += os.read(ours, 1000)
            except OSError:  # it has ended
                break
            if sign in seen and not told.is_set():
                told.set()
                os.write(ours, b"xq")
    finally:
        done.wait(60)
        os.close(ours)
    assert done.returncode == 0
    assert b"\x1b[2J" not in seen  # which flickers
    assert seen.rstrip().endswith(b"\x1b[?1049l")
    return seen


def test_a_watched_status_is_drawn_over_and_left_with_q():
    publish(os.getpid(), engine=engine(), beats=True)
    command = [sys.executable, "-m", "kvpatch", "status", "--watch", "--interval", "0.1"]
    seen = in_a_terminal(command, b"Llama")
    assert b"kvpatch status; q quits\x1b[K" in seen


def test_a_screen_is_drawn_over_and_left_with_q():
    seen = in_a_terminal([sys.executable, "-c", DRAW], b"waits")
    assert b"left" in seen
    assert b"\x1b[Hone\x1b[K" in seen
