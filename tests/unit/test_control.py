"""The socket of an engine: who may ask, what is answered, what it does though nobody waits."""

import json
import os
import queue
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import module, raising
from suspend_world import PAGE

from kvpatch import balance, claims, cli, control, private, state
from kvpatch.balance.options import Options
from kvpatch.cli import listing
from kvpatch.control import client, protocol
from kvpatch.patches.suspend import demand, server
from kvpatch.patches.suspend.server import Question, Server, follow
from kvpatch.patches.suspend.suspension import Suspension
from kvpatch.process import start_ticks
from kvpatch.telemetry import publisher, reader
from kvpatch.telemetry.counters import Totals
from kvpatch.upstream import kvcached_api


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    kinds = SimpleNamespace(WAKEUP=b"wake")
    module(monkeypatch, "vllm.v1.engine", EngineCoreRequestType=kinds)


class Anything:
    """What a weak reference can be made of."""


class Running:
    """A world whose engine has a thread of its own, and listens."""

    def __init__(self, world, name="chat-pool"):
        self.world = world
        world.input_queue = queue.Queue()
        world.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name=["chat", "alias"])
        )
        world.scheduler.get_request_counts = lambda: (
            len(world.scheduler.running),
            len(world.scheduler.waiting),
        )
        self.server = Server(world, world.suspension, name)
        self.threads = set()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self):
        """vLLM's busy loop: it waits for its clients when there is nothing to do."""
        world = self.world
        while True:
            busy = bool(world.batch_queue or world.scheduler.has_requests())
            try:
                kind, question = world.input_queue.get(block=not busy)
            except queue.Empty:
                world.step()
                continue
            if question is None:
                return
            assert kind == b"wake"
            self.threads.add(threading.get_ident())
            question.take(world.suspension)

    def end(self):
        self.world.input_queue.put((b"", None))
        self._thread.join(30)
        self.server.close()


@pytest.fixture
def engine(worlds):
    world = worlds()
    for block in range(4, 16):
        world.pool.cache(block, f"old{block}".encode())
    running = Running(world)
    yield running
    with suppress(FileNotFoundError):
        running.end()


def test_an_idle_engine_is_suspended_and_resumed(engine):
    (found,) = control.engines()
    assert (found.name, found.models, found.phase) == ("chat-pool", ["chat", "alias"], "runs")
    assert found.said["pid"] == os.getpid()
    assert found.said["started"] == start_ticks(os.getpid())
    told = []
    answer = found.suspend(tell=told.append, timeout=60)
    assert (answer.phase, answer.resident, answer.kept, answer.lost) == ("suspended", 12, 12, 0)
    assert answer.sentence == (
        "it is suspended: 12 of 12 blocks are in the tier; 5 MiB given back, 1 MiB still mapped"
    )
    assert control.find("chat").phase == "suspended"
    assert found.suspend().kept == 12
    assert found.resume().phase == "runs"
    assert found.resume().limit == 8 * PAGE
    assert engine.threads == {engine._thread.ident}, "another thread touched the scheduler"


def test_the_status_page_is_written_before_a_verb_is_answered(engine, monkeypatch):
    pages = []
    suspension = engine.world.suspension
    monkeypatch.setattr(publisher, "refresh", lambda: pages.append(suspension.phase.value))
    found = control.find("chat")
    for verb, phase in ((found.suspend, "suspended"), (found.resume, "runs")):
        assert (verb().phase, pages[-1:]) == (phase, [phase])


def test_a_plan_changes_nothing_and_says_what_would_be_lost(engine):
    plan = control.find("chat-pool").plan()
    assert (plan.phase, plan.resident, plan.lost) == ("runs", 12, 0)
    assert plan.sentence == "12 of 12 blocks would be kept"
    assert engine.world.suspension.phase.value == "runs"
    engine.world.tier.room = 10
    plan = control.find("chat-pool").plan()
    assert plan.sentence == (
        "10 of 12 blocks would be kept, 2 do not fit into the tier and would be computed again"
    )
    engine.world.add("runs", 40, 41).left = 10**9
    plan = control.find("chat-pool").plan()
    assert plan.sentence.endswith("; running requests that would be preempted: 1")


def test_the_plan_of_a_suspended_engine_is_what_it_has_kept(engine):
    engine.world.tier.room = 10
    found = control.find("chat-pool")
    done = found.suspend()
    assert (done.resident, done.kept, done.lost) == (12, 10, 2)
    plan = found.plan()
    assert (plan.phase, plan.resident, plan.kept, plan.lost) == ("suspended", 12, 10, 2)
    assert plan.sentence == done.sentence


def test_a_limit_is_set_and_refused(engine):
    found = control.find(str(os.getpid()))
    assert found.limit(4 * PAGE).limit == 4 * PAGE
    totals = state.attach(engine.world.suspension.engine, Totals())
    with pytest.raises(control.Refused, match="it started with 8 MiB and cannot have more"):
        found.limit(9 * PAGE)
    assert totals.refused == {"limit": 1}


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"verb": "dance"}, "it knows describe, suspend, resume, limit, demand, and not 'dance'"),
        ({}, "and not None"),
        ({"verb": "limit", "size": "8GiB"}, "no number of bytes"),
        ({"verb": "limit", "size": True}, "no number of bytes"),
        ({"verb": "suspend", "timeout": "soon"}, "no number of seconds"),
        ({"verb": "suspend", "timeout": -1}, "no number of seconds"),
        ({"verb": "suspend", "timeout": True}, "no number of seconds"),
        ({"verb": "suspend", "timeout": 10**400}, "no number of seconds"),
    ],
)
def test_what_is_no_question_is_refused(engine, asked, why):
    (said,) = client.ask(engine.server.path, asked, 30)
    assert why in said["error"]
    assert said["done"]
    assert engine.world.suspension.phase.value == "runs"


def test_an_error_of_the_engines_thread_is_an_answer(engine, monkeypatch):
    monkeypatch.setattr(Suspension, "plan", raising(ValueError("of a test")))
    with pytest.raises(control.Refused, match="it failed with ValueError: of a test"):
        control.find("chat").plan()


def test_why_a_suspension_failed_is_no_answer_to_later_questions(engine, monkeypatch):
    monkeypatch.setattr(demand, "demand", lambda engine: {"needs": PAGE})
    engine.world.tier.stuck = True
    found = control.find("chat")
    with pytest.raises(control.Refused, match="it was not suspended within"):
        found.suspend(timeout=0.1)
    assert "error" in engine.world.suspension.said
    assert found.demand()["needs"] == PAGE


def test_who_asked_may_go_away(engine):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(engine.server.path))
        protocol.send(caller, {"verb": "suspend"})
    assert control.find("chat").suspend().phase == "suspended"


def suspended(world):
    world.suspension.suspend(False, False, None)
    world.until_idle()
    return world


def answers(suspension, asked, since=None):
    """What is answered to a question that the engine's thread has taken."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        follow(theirs, suspension, asked, time.monotonic() if since is None else since)
        return next(protocol.lines(ours))


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 50])
def test_a_suspension_that_somebody_else_undid_is_no_success(worlds, steps):
    """In any phase, also if the thread that answers looks only afterwards."""
    world = worlds()
    world.pool.cache(4, b"old4")
    world.suspension.suspend(False, False, None)
    for _ in range(steps):
        world.step()
    world.suspension.resume()
    world.until_idle()
    assert "resumed" in answers(world.suspension, {"verb": "suspend"})["error"]
    assert "error" not in answers(world.suspension, {"verb": "resume"})
    world.suspension.limit(4 * PAGE)
    assert "resumed" in answers(world.suspension, {"verb": "suspend"})["error"]


def test_a_resumption_that_somebody_else_undid_is_no_success(worlds):
    world = suspended(worlds())
    said = answers(world.suspension, {"verb": "resume"})
    assert said["error"] == "it was suspended again meanwhile"
    assert "error" not in answers(world.suspension, {"verb": "suspend"})


def test_a_limit_that_could_not_be_given_back_is_said(worlds, monkeypatch):
    world = suspended(worlds())
    with monkeypatch.context() as broken:
        broken.setattr(kvcached_api, "write_limit", raising(PermissionError("of a test")))
        world.suspension.resume()
        world.until_idle()
    assert "could not be set again" in answers(world.suspension, {"verb": "resume"})["error"]
    world.suspension.limit(4 * PAGE)
    assert "error" not in answers(world.suspension, {"verb": "resume"}), "it has another one"


def test_who_wants_everything_kept_is_told_what_an_earlier_suspension_lost(worlds):
    world = worlds(room=1)
    for block in range(4, 8):
        world.pool.cache(block, f"old{block}".encode())
    suspended(world)
    said = answers(world.suspension, {"verb": "suspend", "whole": True})
    assert said["error"] == "it is suspended, and its CPU tier does not have 3 blocks"
    assert "error" not in answers(world.suspension, {"verb": "suspend"})


def test_a_timeout_holds_for_who_joined_a_suspension_without_one(worlds):
    world = worlds()
    world.pool.cache(4, b"old4")
    world.tier.stuck = True
    world.suspension.suspend(False, False, None)
    for _ in range(5):
        world.step()
    said = answers(world.suspension, {"verb": "suspend", "timeout": 1}, time.monotonic() - 10)
    assert said["error"] == "it was not suspended within 1 s: in the phase storing"
    assert said["phase"] == "storing", "somebody else's goes on"


def test_a_suspension_that_comes_too_late_does_not_begin(engine, in_a_long_step):
    with pytest.raises(control.Refused, match=r"not suspended within 0\.5 s: its engine took no"):
        control.find("chat").suspend(timeout=0.5)
    in_a_long_step.set()
    assert control.find("chat").plan().phase == "runs"
    assert engine.world.suspension.given_up == ""


def test_where_requests_use_more_than_the_limit_it_is_said():
    answer = control.Answer("runs", mapped=2 * PAGE, limit=PAGE)
    assert "given back as they end" in answer.sentence
    assert control.Answer("pausing", limit=PAGE).sentence.startswith("it is pausing, with")


@pytest.mark.parametrize(
    "sent", [b"", b"{", b"[]\n", b"\n", b"x" * (protocol.LONGEST + 1), b"\xff\n"]
)
def test_what_is_no_line_ends_the_connection_alone(engine, sent):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(30)
        caller.connect(str(engine.server.path))
        with suppress(OSError):
            caller.sendall(sent)
            caller.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert caller.recv(10) == b""
    assert control.find("chat").plan().resident == 12


def test_only_its_user_can_reach_it(engine):
    assert stat.S_IMODE(engine.server.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(engine.server.path.stat().st_mode) == 0o600


def test_another_users_process_is_not_heard(engine, monkeypatch):
    """Also if it is there because somebody opened the folder."""
    uid = os.geteuid()
    monkeypatch.setattr(protocol, "check_peer", lambda connection: None)  # of the caller
    found = control.engines()
    monkeypatch.undo()
    assert len(found) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: uid + 1)
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(PermissionError, match="at the other end"):
            protocol.check_peer(ours)


def test_a_folder_of_another_user_is_not_used():
    folder = protocol.folder()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(private.Unsafe, match="is open to other users"):
        control.engines()
    with pytest.raises(private.Unsafe, match="is open to other users"):
        Server(Anything(), Anything(), "chat")


def listening(name, backlog=None):
    """A socket that is an engine's by its name, and listens if it has a backlog."""
    private.make_folder(protocol.folder())
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(protocol.path_of(name)))
    if backlog is not None:
        made.listen(backlog)
    return made


def test_the_socket_of_a_killed_engine_is_skipped_and_replaced(worlds):
    listening("chat-pool").close()
    assert control.engines() == []
    with pytest.raises(control.Refused, match="no engine chat-pool of"):
        control.find("chat-pool")
    running = Running(worlds())
    assert [one.name for one in control.engines()] == ["chat-pool"]
    running.end()
    assert not protocol.path_of("chat-pool").exists()


def test_an_engine_removes_the_sockets_of_killed_ones_and_no_others(worlds):
    """Names are generated, so that nobody starts an engine of a killed one's name again."""
    living = Running(worlds(), "living")
    listening("dead").close()
    silent = listening("silent", 0)
    waits = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for caller in waits:
        caller.setblocking(False)
        caller.connect_ex(str(protocol.path_of("silent")))
    starts = Running(worlds(), "starts")
    assert not protocol.path_of("dead").exists()
    assert protocol.path_of("silent").exists()
    assert protocol.path_of("living").exists()
    for one in (silent, *waits):
        one.close()
    for running in (living, starts):
        running.end()


@pytest.fixture
def stopped(monkeypatch):
    """The socket of an engine that was stopped; it has memory all the same."""
    monkeypatch.setattr(client, "ANSWERS", 0.1)
    with listening("stopped", 2) as made:
        yield made


def seen_as(state, line="", pid=7):
    content = {"vllm": "vllm 0.27.0", "engine": {"pool": "chat"}}
    return reader.Seen(pid, state, line, SimpleNamespace(content=content))


def test_an_engine_that_was_killed_is_gone_and_not_one_that_cannot_be_suspended(
    worlds, monkeypatch
):
    pages = [seen_as(reader.State.KILLED, "pid 7 exited without cleanup (killed?)")]
    monkeypatch.setattr(reader, "all_of", lambda everyone: pages)
    for name in ("chat", "7"):
        with pytest.raises(control.Refused, match=f"^{name} is gone, with .* caches: pid 7 exited"):
            control.find(name)
    pages.append(seen_as(reader.State.RUNS, pid=8))  # started again
    with pytest.raises(control.Refused, match="in process 8, where engines cannot"):
        control.find("chat")
    pages[1] = seen_as(reader.State.FOREIGN, "pid 8 cannot be seen from here", pid=8)
    with pytest.raises(control.Refused, match="chat does not listen here: pid 8 cannot be seen"):
        control.find("chat")


def test_an_engine_that_does_not_answer_is_not_one_that_is_gone(stopped, capsys):
    with pytest.raises(control.Refused, match=f"process {os.getpid()} listens and does not answer"):
        control.find("stopped")
    for _ in range(3):  # then nobody else can wait for it
        assert control.engines() == []
    with pytest.raises(control.Refused, match=r"\.sock listens and does not answer within"):
        control.find("stopped")
    assert cli.main(["list"]) == 1
    said = capsys.readouterr()
    assert "listens and does not answer" in said.err
    assert said.out == ""


def test_beside_an_engine_that_does_not_answer_others_do(stopped, engine, monkeypatch):
    monkeypatch.setattr(client, "ANSWERS", 5.0)
    with pytest.raises(control.Refused, match=r"there are chat-pool; process .* not answer"):
        control.find("nobody")


@pytest.fixture
def asked(monkeypatch):
    """The sockets that are asked, in order."""
    paths = []
    ask = client.ask

    def recorded(path, *arguments):
        paths.append(path)
        return ask(path, *arguments)

    monkeypatch.setattr(client, "ask", recorded)
    return paths


def test_an_engine_is_asked_by_its_name_without_the_others(stopped, engine, asked, monkeypatch):
    monkeypatch.setattr(client, "ANSWERS", 30.0)
    assert control.find("chat-pool").name == "chat-pool"
    assert asked == [engine.server.path]


def test_an_engine_that_does_not_answer_is_not_taken_for_another_of_its_model(
    stopped, engine, asked
):
    engine.world.vllm_config.model_config.served_model_name = ["stopped"]
    with pytest.raises(control.Refused, match="listens and does not answer within"):
        control.find("stopped")
    assert asked == [protocol.path_of("stopped")]


def test_a_verb_imports_nothing_that_asking_one_engine_does_not_need():
    """An operator, or a script for each of many engines, waits for the command's start."""
    needless = {"psutil", "kvpatch.telemetry.reader", "subprocess"}
    here = f"import sys; before = set(sys.modules); import kvpatch.cli.limit; {needless=!r}"
    code = f"{here}; print(*needless & (set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_all_engines_are_asked_at_the_same_time(monkeypatch):
    private.make_folder(protocol.folder())
    for number in range(8):
        protocol.path_of(f"engine{number}").touch()
    together = threading.Barrier(8)

    def ask(path, *_):
        together.wait(30)  # all of them, or BrokenBarrierError
        yield {"name": path.name}

    monkeypatch.setattr(client, "ask", ask)
    found, silent = client.every()
    assert [one.name for one in found] == sorted(one.name for one in found)
    assert (len(found), silent) == (8, [])


def test_a_socket_that_was_removed_is_there_again(worlds, monkeypatch):
    """As by systemd-logind with RemoveIPC=yes: the folder is gone too."""
    monkeypatch.setattr(server, "LOOKS", 0.01)
    running = Running(worlds())
    shutil.rmtree(running.server.path.parent)
    deadline = time.monotonic() + 60
    while not control.engines():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert control.find("chat").suspend().phase == "suspended"
    running.end()
    assert not running.server.path.exists()


def test_an_engine_at_rest_takes_its_own_limit_when_its_controller_is_gone(worlds, monkeypatch):
    for looks in (0.01, 3600.0):  # asked by nobody, and all the time
        monkeypatch.setattr(server, "LOOKS", looks)
        running = Running(worlds())
        running.world.suspension.controller.heard(0.01, 5 * PAGE)
        deadline = time.monotonic() + 60
        while running.world.manager.limit != 5 * PAGE:
            assert time.monotonic() < deadline
            if looks > 1:
                assert control.find("chat")
            time.sleep(0.01)
        running.end()


def test_a_question_that_was_given_up_while_the_engine_was_stopped_is_not_taken(engine):
    """Who asked was killed, or has told its user that there was no answer."""
    asked = {"verb": "limit", "size": 3 * PAGE}
    for waits in (False, True):
        here, there = socket.socketpair()
        with here, there:
            if not waits:
                there.close()
            engine.server._answer(here, asked)
        control.find("chat").plan()  # what came before it was taken
        assert (engine.world.manager.limit == 3 * PAGE) is waits


def test_a_folder_that_somebody_keeps_locked_is_given_up(worlds, monkeypatch):
    """Such as an engine that was stopped while it started: others start, and do not listen."""
    monkeypatch.setattr(server, "LOCKED", 0.1)
    world = worlds()
    private.make_folder(protocol.folder())
    locked = private.alone(protocol.folder(), private.within(1))
    with locked, pytest.raises(OSError, match="locked for"):
        Server(world, world.suspension, "chat")
    Server(world, world.suspension, "chat").close()


def test_a_folder_is_named_after_the_user_outside_of_a_container(monkeypatch):
    """Two containers that share /dev/shm may both have a root of their own."""
    monkeypatch.setattr(claims, "outer_uid", lambda: 165536)
    assert protocol.folder().name == "kvpatch-control-165536"


@pytest.fixture
def in_a_long_step(engine):
    """The engine's thread is in a step, until this is set."""
    held, goes = threading.Event(), threading.Event()
    step = engine.world.step

    def long():
        held.set()
        assert goes.wait(30)
        return step()

    engine.world.step = long
    engine.world.add("runs", 40, 41).left = 3
    engine.world.input_queue.put((b"wake", Question({"verb": "resume"})))
    assert held.wait(30)
    return goes


def test_an_engine_in_a_long_step_says_that_it_is_there(engine, in_a_long_step):
    said = []
    for line in client.ask(engine.server.path, {"verb": "suspend", "plan": True}, 30):
        said.append(line)
        in_a_long_step.set()
    assert said[0] == {"phase": "runs"}
    assert said[-1]["resident"] == 14


def test_two_engines_of_one_model_are_told_apart(worlds):
    both = [Running(worlds(), name) for name in ("first", "second")]
    with pytest.raises(control.Refused, match="use one of the names first, second"):
        control.find("chat")
    control.find("second").suspend()
    assert [one.phase for one in control.engines()] == ["runs", "suspended"]
    for running in both:
        running.end()


def test_an_engine_that_ends_meanwhile_is_said(engine):
    found = control.find("chat")
    engine.end()
    with pytest.raises(control.Refused, match="chat-pool did not answer"):
        found.suspend()


def test_the_commands(engine, capsys):
    def ran(*words, code=0):
        assert cli.main([*words]) == code
        return capsys.readouterr()

    head, line = ran("list").out.splitlines()[:2]
    assert head.split() == [*listing.HEAD]
    assert line.split()[1:4] == ["chat-pool", "chat,", "alias"]
    assert "runs" in line
    assert "chat-pool: 12 of 12 blocks would be kept" in ran("suspend", "chat", "--plan").out
    assert "12 of 12 blocks are in the tier" in ran("suspend", "chat", "--timeout", "60").out
    assert " suspended " in ran("list").out
    said = ran("limit", "chat", "4MiB").out
    assert "; the limit is taken: 4 MiB from its resumption on" in said
    answer = json.loads(ran("resume", "chat", "--json").out.splitlines()[-1])
    assert (answer["name"], answer["phase"], answer["limit"]) == ("chat-pool", "runs", 4 * PAGE)
    line, whole = ran("list").out.splitlines()[1:]
    assert line.endswith("  4 MiB  4 MiB  0 B")
    assert whole == "of all: 4 MiB lent, 0 B borrowed"
    said = ran("limit", "chat", "1GiB", code=1).err
    assert "chat: it started with 8 MiB and cannot have more" in said
    error = json.loads(ran("resume", "nobody", "--json", code=1).out)["error"]
    assert "no engine nobody" in error
    assert json.loads(ran("list", "--json").out)[0]["phase"] == "runs"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["suspend", "chat"], "it will be suspended when its blocks are stored; kvpatch resume"),
        (["suspend", "chat", "--finish"], "when its running requests have finished; kvpatch"),
        (["resume", "chat"], "it is resumed as soon as it has its memory"),
        (["limit", "chat", "4MiB"], "it keeps to the limit that it was told"),
    ],
)
def test_an_interrupted_command_says_what_goes_on(engine, monkeypatch, capsys, words, said):
    monkeypatch.setattr(client.Engine, "_ask", raising(KeyboardInterrupt))
    assert cli.main(words) == 130
    line = capsys.readouterr().err
    assert line.startswith("chat-pool goes on: ")
    assert said in line


def test_without_engines_the_list_is_empty(capsys):
    assert cli.main(["list"]) == 1
    assert capsys.readouterr().out == "no engine of this user listens\n"


def test_a_data_parallel_server_is_asked_by_the_names_of_its_engines(monkeypatch):
    names = ["chat", "code-dp0", "code-dp1", "last-dp3", "chat-dp0x", "qwen2-5-dp0"]
    known = [client.Engine(Path(name), {"name": name, "models": ["model"]}) for name in names]
    monkeypatch.setattr(client, "every", lambda: (known, []))
    assert control.find("code-dp1").name == "code-dp1"
    assert control.find("chat").name == "chat"
    assert control.find("last").name == "last-dp3"  # the only one on this machine
    assert control.find("qwen2.5").name == "qwen2-5-dp0"
    with pytest.raises(control.Refused) as refused:
        control.find("code")
    assert str(refused.value) == ("2 engines serve code: use one of the names code-dp0, code-dp1")


@pytest.mark.parametrize("name", ["qwen2.5", "org/model v1", "x" * 70, "Zürich_1"])
def test_an_engine_is_found_by_the_name_that_it_was_given(monkeypatch, name):
    monkeypatch.setenv("KVCACHED_IPC_NAME", name)
    kept = pytest.importorskip("kvcached.utils")._obtain_default_ipc_name()
    known = [client.Engine(Path(one), {"name": one, "models": ["model"]}) for one in (kept, "chat")]
    monkeypatch.setattr(client, "every", lambda: (known, []))
    assert control.find(name).name == kept
    terms = balance.Terms(floor=1)
    options = Options(terms={name: terms})
    assert options.terms_of(kept) == terms
    assert options.terms_of("chat") == balance.Terms()
    assert options.unused([kept, "chat"]) == []
    assert options.unused(["chat"]) == [name]
