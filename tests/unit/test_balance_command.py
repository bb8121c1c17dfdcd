"""``kvpatch balance`` as a command, its settings, and sockets of engines that answer it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpatch import claims, cli, control, private
from kvpatch.balance import loop, options, seen
from kvpatch.balance.options import Options, Wrong
from kvpatch.balance.records import Terms
from kvpatch.cli import balance as command
from kvpatch.control import protocol
from kvpatch.telemetry.reader import State

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).parents[2]
# The command, in a /dev/shm of its own.
RUN = """
import sys
from pathlib import Path
from kvpatch import claims, cli
claims.BASE = Path(sys.argv[1])
sys.exit(cli.main(["balance", *sys.argv[2:]]))
"""


@pytest.fixture
def base():
    """What a test has in the place of /dev/shm."""
    return claims.BASE


class Engine:
    """What listens at the socket of an engine, and keeps to a limit at once."""

    def __init__(self, name, limit, mapped, device, **more):
        self.name, self.limit, self.mapped, self.device = name, limit, mapped, device
        self.more = {"needs": 0, "waiting": 0, "least": 50 * MIB} | more
        self.more_said = {}  # whatever the question is
        self.revision = 0
        self.mute = False
        self.controlled = []  # for how long whoever looks sees to the limits
        self.others = []
        private.make_folder(protocol.folder())
        self.path = protocol.path_of(name)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self._socket.listen(64)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection, suppress(OSError, StopIteration):
            asked = next(protocol.lines(connection))
            while self.mute:
                time.sleep(0.05)
            protocol.send(connection, self.answer(asked) | self.more_said | {"done": True})

    def answer(self, asked):
        said = {"phase": "runs", "limit": self.limit, "mapped": self.mapped}
        if asked["verb"] == "describe":
            about = {"name": self.name, "pid": os.getpid(), "models": [f"model-{self.name}"]}
            counts = {"running": 0, "waiting": self.more["waiting"], "revision": self.revision}
            first = self.more.get("first", self.device)
            return said | about | counts | {"most": self.device, "first": first}
        if asked["verb"] == "demand":
            self.controlled.append(asked.get("controls"))
            free = self.device - sum(one.mapped for one in (self, *self.others))
            known = {"device": "GPU-1", "free": free, "page": 2 * MIB, "longest": 1000}
            return said | known | {part: self.more[part] for part in ("least", "needs")}
        if asked.get("revision", 1 << 60) <= self.revision:
            return said | {"error": "its limit was set by somebody else"}
        self.revision, self.limit = asked.get("revision", self.revision + 1), asked["size"]
        self.mapped = min(self.mapped, self.limit)
        return said | {"limit": self.limit, "mapped": self.mapped}

    def close(self):
        self.mute = False
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.path.unlink(missing_ok=True)


@pytest.fixture
def pair():
    """One with requests that wait, and one with memory."""
    chat = Engine("chat", 300 * MIB, 300 * MIB, 1000 * MIB, needs=480 * MIB, waiting=3)
    code = Engine("code", 700 * MIB, 700 * MIB, 1000 * MIB)
    chat.others, code.others = [code], [chat]
    yield chat, code
    chat.close()
    code.close()


def start(base, *words):
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(base), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"KVPATCH": "0", "PYTHONPATH": str(ROOT)},
    )


def test_memory_moves_between_engines(pair, capsys):
    chat, code = pair
    assert cli.main(["balance", "--rounds", "1"]) == 0
    assert (chat.limit, code.limit) == (600 * MIB, 400 * MIB)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines[-4:] == [
        "code: 700 MiB -> 400 MiB, because it has no requests, and others need memory",
        "chat: 300 MiB -> 600 MiB, because 3 of its requests wait",
        "chat: is left with 600 MiB at most; it started with 1000 MiB: kvpatch balance --restore",
        "code: is left with 400 MiB at most; it started with 1000 MiB: kvpatch balance --restore",
    ]


def test_the_limits_that_engines_started_with_are_restored(pair, capsys):
    chat, code = pair
    code.more["first"] = 400 * MIB
    assert cli.main(["balance", "--restore"]) == 0
    assert (chat.limit, code.limit) == (1000 * MIB, 400 * MIB)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "code: 700 MiB -> 400 MiB, because it started with that",
        "chat: 300 MiB -> 1000 MiB, because it started with that",
    ]
    assert cli.main(["limit", "code", "50%"]) == 0
    assert code.limit == 500 * MIB
    assert cli.main(["limit", "code", "--reset"]) == 0
    assert code.limit == 400 * MIB


def test_an_engine_that_does_not_answer_is_not_restored_and_that_is_said(pair, monkeypatch, capsys):
    monkeypatch.setattr(seen, "PATIENCE", 0.3)
    chat, code = pair
    code.mute = True
    assert cli.main(["balance", "--restore"]) == 1
    chat.mute = True
    assert cli.main(["balance", "--restore"]) == 1, "though it listens, as the other one"
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    said = "keeps 0 B: it does not answer: timed out"
    assert lines == [
        f"{code.path.name}: {said}",
        "chat: 300 MiB -> 1000 MiB, because it started with that",
        *(f"{one.path.name}: {said}" for one in pair),
    ]


def test_a_dry_run_looks_once(pair, capsys):
    assert cli.main(["balance", "--dry-run"]) == 0
    assert "code: would be 700 MiB -> 400 MiB" in capsys.readouterr().out
    assert [one.limit for one in pair] == [300 * MIB, 700 * MIB]


def test_a_dry_run_ends_1_for_a_name_that_is_of_no_engine(pair, capsys):
    assert cli.main(["balance", "--dry-run", "--floor", "typo=1MiB"]) == 1
    assert "no engine is called typo" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["chat=abc", "chat"])
def test_a_floor_that_cannot_be_used_is_a_mistake_of_use(given):
    try:
        code = cli.main(["balance", "--floor", given])
    except SystemExit as ended:
        code = ended.code
    assert code == 2


def test_a_dry_run_beside_a_balance_sets_nothing(pair, capsys):
    with loop.alone():
        assert cli.main(["balance", "--dry-run", "--rounds", "2", "--every", "0.1", "--json"]) == 0
        assert cli.main(["balance", "--rounds", "1"]) == 1
    assert [one.limit for one in pair] == [300 * MIB, 700 * MIB]
    printed = capsys.readouterr()
    events = [json.loads(line) for line in printed.out.splitlines()]
    assert [(one["name"], one["limit"]) for one in events if one["what"] == "limit"] == [
        ("code", 400 * MIB),
        ("chat", 600 * MIB),
    ]
    assert all(one["dry"] for one in events)
    assert f"another kvpatch balance of this user runs (pid {os.getpid()})" in printed.err


def test_a_limit_that_is_no_whole_page_is_the_one_it_started_with(pair):
    chat, code = pair
    chat.limit, chat.more["first"] = 1001 * MIB, 1000 * MIB  # a page is 2 MiB
    code.limit, code.more["first"] = 998 * MIB, 1000 * MIB
    told = []
    command.leave({}, told.append)
    assert [(one.name, bool(one.why)) for one in told] == [("chat", False), ("code", True)]


def test_who_sets_limits_says_for_how_long_and_who_only_looks_does_not(pair):
    assert cli.main(["balance", "--dry-run"]) == 0
    assert cli.main(["balance", "--rounds", "2", "--every", "0.1"]) == 0
    # A second look of each round, and the one at the end, are for what the engines have then.
    assert [set(one.controlled) for one in pair] == [{None, 10 + 3 * 0.1}] * 2
    assert pair[0].controlled[0] is None


def test_an_engine_that_is_stuck_delays_nobody(pair, monkeypatch):
    monkeypatch.setattr(seen, "PATIENCE", 0.3)
    chat, _ = pair
    before = seen.look({})
    assert before["chat"].engine.answers
    assert before["chat"].engine.page == 2 * MIB
    chat.mute = True
    begun = time.monotonic()
    after = seen.look(before)
    assert time.monotonic() - begun < 5
    assert not after["chat"].engine.answers
    assert after["chat"].engine.limit == 300 * MIB
    assert after["code"].engine.answers


def test_an_engine_that_never_answered_is_named_and_nothing_is_promised_beside_it(
    base, pair, monkeypatch, capsys
):
    """Stopped when balance starts: it may go on, and map up to its limit."""
    monkeypatch.setattr(seen, "PATIENCE", 0.3)
    chat, code = pair
    chat.others = []  # whose device has 700 MiB free
    code.mute = True
    pool = base / "code"
    pool.touch(0o600)
    pool.write_bytes((700 * MIB).to_bytes(8, sys.byteorder) + bytes(16))
    assert cli.main(["balance", "--rounds", "1"]) == 0
    assert chat.limit == 300 * MIB
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "chat: is here, with 300 MiB at most",
        "code: is here, with 700 MiB at most",
        "code: keeps 700 MiB: it does not answer: timed out",
        "code: it has not said which device it is on, and is left as it is",
        "chat: is left with 300 MiB at most; it started with 1000 MiB: kvpatch balance --restore",
        "code: is left with 700 MiB at most",
    ]
    there = seen.look({})
    code.mute = False
    assert (there["code"].engine.limit, seen.look(there)["code"].engine.answers) == (
        700 * MIB,
        True,
    )


def test_one_that_answers_at_last_is_the_engine_that_it_was(pair, monkeypatch):
    monkeypatch.setattr(seen, "PATIENCE", 0.3)
    _, code = pair
    said = []
    balance = loop.Balance(tell=lambda event: said.append(event.line.partition(" ")[2]))
    code.mute = True
    balance.round()
    code.mute = False
    said.clear()
    balance.round()
    assert said[:1] == [f"{code.path.name}: has ended"], "its pool is gone, and with it its name"
    assert (pair[0].limit, code.limit) == (600 * MIB, 400 * MIB)


def test_what_answers_nonsense_is_an_engine_that_does_not_answer(pair):
    chat, _ = pair
    chat.answer = lambda asked: {"phase": "runs"}
    found = seen.look({})
    assert {name: one.engine.answers for name, one in found.items()} == {
        chat.path.name: False,
        "code": True,
    }


def test_an_engine_that_started_again_in_its_container_has_the_same_pid(pair):
    chat, _ = pair
    chat.more_said["started"] = 5
    before = seen.look({})
    chat.more_said["started"] = 6
    after = seen.look(before)
    assert before["chat"].engine.born != after["chat"].engine.born
    assert before["code"].engine.born == after["code"].engine.born


def test_what_is_mapped_is_of_the_moment_of_what_is_free(pair):
    """Else what an engine gives back between two questions is counted twice."""
    _, code = pair
    answer = code.answer

    def gives_back(asked):
        said = answer(asked)
        code.mapped = 100 * MIB
        if asked["verb"] == "demand":
            said["mapped"] = said["mapped"] = code.mapped
        return said

    code.answer = gives_back
    found = seen.look({})["code"]
    assert found.engine.mapped == 100 * MIB
    assert found.free + found.engine.mapped == 700 * MIB


def test_the_socket_of_a_killed_engine_is_nobody(pair):
    chat, _ = pair
    before = seen.look({})
    chat._socket.shutdown(socket.SHUT_RDWR)
    chat._socket.close()
    assert set(seen.look(before)) == {"code"}
    chat._socket = socket.socket(socket.AF_UNIX)
    chat._socket.bind(str(chat.path) + "-")
    chat._socket.listen()


def test_an_engine_of_another_build_is_told_nothing(pair):
    """It does not know what it needs."""
    chat, _ = pair
    answer = chat.answer
    chat.answer = lambda asked: (
        {"error": "it knows describe, and not 'demand'"}
        if asked["verb"] == "demand"
        else answer(asked)
    )
    found = seen.look({})["chat"]
    assert not found.engine.answers
    assert found.why_not == "it knows describe, and not 'demand'"
    assert found.device == ""


def test_tokens_that_prompts_found_are_bytes(pair, monkeypatch):
    monkeypatch.setattr(seen, "found_tokens", lambda: {"chat": 2000})
    assert seen.look({})["chat"].engine.found == 100 * MIB  # 1000 of them are 50 MiB
    assert seen.look({})["code"].engine.found is None, "another container's, with the same pid"
    monkeypatch.setattr(seen, "found_tokens", dict)
    assert seen.look({})["chat"].engine.found is None


def test_what_came_from_a_disk_is_found_once(pair, monkeypatch):
    """It is of the tier's hits, which are counted without their source too."""
    content = {"engine": {"pool": "chat", "hits": {"device": 1000, "tier": 700, "disk": 600}}}
    page = SimpleNamespace(pid=os.getpid(), state=State.RUNS, page=SimpleNamespace(content=content))
    monkeypatch.setattr(seen.reader, "alive", lambda: [page])
    assert seen.found_tokens() == {"chat": 1700}


def test_a_suspended_engine_is_seen_with_what_it_will_take_back(pair):
    chat, _ = pair
    chat.more_said = {"phase": "suspended", "limit": 2 * MIB, "promised": 300 * MIB}
    found = seen.look({})["chat"].engine
    assert (found.suspended, found.answers, found.limit) == (True, True, 300 * MIB)
    assert loop.set_limit(seen.look({})["chat"], 200 * MIB, 5) == 200 * MIB, "from then on"


@pytest.mark.parametrize("phase", ["pausing", "storing", "releasing", "resuming"])
def test_an_engine_on_its_way_into_a_suspension_or_back_is_left_alone(pair, phase):
    chat, _ = pair
    chat.more_said = {"phase": phase}
    found = seen.look({})["chat"]
    assert (found.engine.answers, found.engine.suspended) == (False, False)
    assert found.why_not == f"it is {phase}"


def test_where_nobody_listens_nothing_is_done(capsys):
    assert cli.main(["balance", "--rounds", "1"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("option", ["--dry-run", "--restore"])
def test_one_look_that_meets_nobody_says_so(option, capsys):
    assert cli.main(["balance", option]) == 1
    assert capsys.readouterr().err == "kvpatch balance: no engine of this user listens\n"


def test_an_open_folder_is_refused(base, capsys):
    protocol.folder().mkdir()
    protocol.folder().chmod(0o777)
    assert cli.main(["balance", "--rounds", "1"]) == 1
    assert "is open to other users" in capsys.readouterr().err


def test_a_killed_balance_leaves_engines_and_the_lock(base, pair):
    """Again and again, at any moment; the next one begins at once."""
    chat, code = pair
    for number in range(4):
        busy, idle = (chat, code) if number % 2 else (code, chat)
        busy.more |= {"needs": 480 * MIB, "waiting": 2}
        idle.more |= {"needs": 0, "waiting": 0}
        # Whatever the killed one came to, the next one has something to move and says so.
        busy.limit = busy.mapped = 300 * MIB
        idle.limit = idle.mapped = 700 * MIB
        process = start(base, "--every", "0.01")
        assert process.stdout is not None
        for _ in range(1 + number):  # of four lines: who is here, who gives, who gets
            assert process.stdout.readline()
        process.kill()
        process.communicate(timeout=60)
        assert chat.limit + code.limit <= 1000 * MIB
        assert min(chat.limit, code.limit) >= 50 * MIB
    assert cli.main(["balance", "--rounds", "1"]) == 0


def test_it_ends_in_order_when_it_is_interrupted(base, pair):
    process = start(base)
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_nothing_of_vllm_is_imported(base):
    code = RUN.replace("sys.exit(", "assert not (") + (
        "print([one for one in ('vllm', 'torch', 'kvcached', 'numpy') if one in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(base), "--rounds", "1"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"KVPATCH": "0", "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "[]"


def test_a_limit_is_refused_if_somebody_set_another_one_since(pair):
    found = control.find("chat")
    assert found.limit(400 * MIB, revision=1, patience=5).limit == 400 * MIB
    with pytest.raises(control.Refused, match="set by somebody else"):
        found.limit(500 * MIB, revision=1, patience=5)


def test_an_answer_is_not_waited_for_for_ever(pair):
    chat, _ = pair
    found = control.find("chat")
    chat.mute = True
    with pytest.raises(control.Unanswered, match="did not answer"):
        found.limit(400 * MIB, patience=0.2)
    with pytest.raises(control.Unanswered, match="did not answer"):
        found.demand(patience=0.2)


def parsed(*words):
    (balance,) = (one for one in cli.COMMANDS if one.name == "balance")
    return command.read(cli.parser([balance]).parse_args(["balance", *words]))


def test_flags():
    found = parsed(
        *("--floor", "chat=4GiB", "--ceiling", "chat=20GiB", "--priority", "chat=2"),
        *("--priority", "*=0.5", "--memory", "60GiB", "--every", "2s"),
    )
    assert found == Options(
        {"chat": Terms(4 * GIB, 20 * GIB, 2.0), "*": Terms(priority=0.5)}, 2.0, 60 * GIB
    )
    assert found.terms_of("chat").floor == 4 * GIB
    assert found.terms_of("x", ["chat"]).floor == 4 * GIB
    assert found.terms_of("y").priority == 0.5
    assert Options().terms_of("y") == Terms()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the standard library reads TOML from 3.11")
def test_a_file_and_flags_before_it(tmp_path):
    path = tmp_path / "balance.toml"
    path.write_text(
        'every = "5s"\nmemory = "60GiB"\n'
        '[engines.chat]\nfloor = "4GiB"\nceiling = "20GiB"\nlends = true\n'
        '[engines."*"]\npriority = 2\n'
    )
    found = parsed("--config", str(path), "--floor", "chat=8GiB", "--every", "1s")
    assert found == Options(
        {"chat": Terms(8 * GIB, 20 * GIB, lends=True), "*": Terms(priority=2.0)}, 1.0, 60 * GIB
    )
    found = parsed("--config", str(path), "--lend", "*", "--lend", "code", "--no-lend", "chat")
    assert found.terms["*"] == Terms(priority=2.0, lends=True)
    assert found.terms["code"] == Terms(lends=True)
    assert found.terms["chat"] == Terms(4 * GIB, 20 * GIB, lends=False)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("colour = 1", "colour is not known; there are every, memory, engines"),
        (
            "[engines.chat]\nflor = 1",
            "chat: flor is not known; there are floor, ceiling, priority, lends",
        ),
        ("[engines.chat]\nlends = 1", "lends of chat is 1, and neither true nor false"),
        ("engines = 5", "engines is no table of tables"),
        ("engines.chat = 5", "engines is no table of tables"),
        ('every = "soon"', "every is soon, and it is not a duration"),
        ('every = "99999999999999h"', "every is 99999999999999h, and it is more than 30 years"),
        ("memory = true", "memory is True, and it is not a size"),
        ("memory = 60", "memory is 60, and it is less than 1 MiB; use for example 2GiB"),
        ("[engines.chat]\nfloor = 4", "the floor of chat is 4, and it is less than 1 MiB"),
        ('[engines.chat]\nceiling = "4"', "the ceiling of chat is 4, and it is less than 1 MiB"),
        ('[engines.chat]\nfloor = "much"', "the floor of chat is much, and it is not a size"),
        ("[engines.chat]\npriority = 0", "the priority of chat is 0, and no number from 0.001"),
        ("[engines.chat]\npriority = true", "the priority of chat is True, and no number"),
        ("[engines.chat]\npriority = nan", "the priority of chat is nan, and no number"),
        ("x", "is not TOML"),
    ],
)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the standard library reads TOML from 3.11")
def test_a_file_that_cannot_be_used_is_refused_with_a_sentence(text, why, tmp_path, capsys):
    path = tmp_path / "balance.toml"
    path.write_text(text)
    assert cli.main(["balance", "--config", str(path), "--rounds", "1"]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert len(error.splitlines()) == 1


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(Wrong, match="cannot be read"):
        options.read(tmp_path / "none.toml")


def test_a_floor_above_its_ceiling_is_refused():
    with pytest.raises(Wrong, match=r"the floor of chat, 8\.0 GiB, is above its ceiling, 4\.0 GiB"):
        parsed("--floor", "chat=8GiB", "--ceiling", "chat=4GiB")


def test_an_engine_that_is_to_lend_and_not_to_lend_is_refused():
    with pytest.raises(Wrong, match="a, c has both --lend and --no-lend; leave one out"):
        parsed(*(f"--lend={name}" for name in "cab"), "--no-lend=a", "--no-lend=c")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--floor", "4GiB"), "4GiB is not NAME=VALUE"),
        (("--rounds", "0"), "0 is no number above 0"),
        (("--dry-run", "--restore"), "argument --restore: not allowed with argument --dry-run"),
    ],
)
def test_flags_that_are_none(words, why, capsys):
    with pytest.raises(SystemExit):
        parsed(*words)
    assert why in capsys.readouterr().err
