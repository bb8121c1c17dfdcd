"""``kvpatch pool`` and what doctor says of a pool."""

import json
import os
import time
from types import SimpleNamespace

import pytest
from fakes import raising
from pool_world import MIB, owner

from kvpatch import cli, environ, host_memory
from kvpatch.doctor import Level
from kvpatch.doctor import pool as doctor
from kvpatch.environ import HOST_POOL, HOST_POOL_FLOOR
from kvpatch.host_memory import HostMemory
from kvpatch.pool import ledger
from kvpatch.pool.member import join


@pytest.fixture
def name(monkeypatch):
    """The name of a pool that nobody has, which is set here."""
    made = f"test{os.getpid()}{os.urandom(4).hex()}"
    monkeypatch.setenv(HOST_POOL.name, f"8MiB@{made}")
    yield made
    folder = ledger.home(made)
    if folder.exists():
        folder.rmdir()


@pytest.fixture
def engine(name):
    """An engine in the pool with two MiB."""
    path = ledger.record_of(ledger.home(name), "one")
    member = join(path, 8 * MIB, owner(name="a/\x1b[31mmodel"))
    assert member.take(2 * MIB)
    member.look(MIB, time.monotonic() - 5)
    yield member
    member.leave()


def printed(capsys, *words):
    return cli.main(["pool", *words]), capsys.readouterr().out


def set_clock(monkeypatch, now):
    """Stop the command's clock; a wait for a lock would not end while everybody's stands."""
    monkeypatch.setattr("kvpatch.cli.pool.time", SimpleNamespace(monotonic=lambda: now))


def test_a_pool_is_shown(engine, capsys, monkeypatch):
    now = time.monotonic()
    set_clock(monkeypatch, now)
    engine.look(MIB, now - 5)
    code, text = printed(capsys)
    assert code == 0
    assert text.splitlines()[0] == "2 MiB of 8 MiB committed"
    told = "a/\\x1b[31mmodel 2 MiB 1 MiB 0 B 64 MiB 5 s"
    assert text.splitlines()[2].split() == told.split()
    code, text = printed(capsys, "--json")
    shown = json.loads(text)
    assert (shown["limit"], shown["started_with"], shown["committed"]) == (
        8 * MIB,
        8 * MIB,
        2 * MIB,
    )
    assert shown["engines"][0]["resident"] == MIB


def test_the_limit_is_set(engine, capsys):
    code, text = printed(capsys, "1MiB")
    assert code == 0
    assert text.splitlines()[0] == "2 MiB of 1 MiB committed (started with 8 MiB)"
    assert engine.look(0, 0.0).limit == MIB


def test_a_limit_below_an_extent_is_said(name, capsys):
    member = join(ledger.record_of(ledger.home(name), "one"), 8 * MIB, owner(extent=2 * MIB))
    try:
        assert printed(capsys, "2MiB")[1].splitlines()[-1].endswith("-")
        assert "stores nothing: it takes 2 MiB at a time" in printed(capsys, "1MiB")[1]
    finally:
        member.leave()


def test_a_limit_above_the_memory_of_the_machine_is_refused(engine, capsys, monkeypatch):
    free = HostMemory(shm=20 * MIB, container=None, available=100 * MIB, swap=0)
    monkeypatch.setattr(host_memory, "here", lambda: free)
    assert printed(capsys, "22MiB")[0] == 0
    code, text = printed(capsys, "23MiB")
    assert code == 2
    assert text.startswith("the engines of the pool may take 23 MiB then, and /dev/shm and the")
    assert "have 22 MiB for it" in text
    assert engine.look(0, 0.0).limit == 22 * MIB
    monkeypatch.setattr(host_memory, "here", lambda: free._replace(shm=0, available=0))
    assert printed(capsys, "21MiB")[0] == 0, "a lower one is none of its business"
    monkeypatch.setattr(host_memory, "here", lambda: free._replace(shm=62 * MIB))
    assert printed(capsys, "1024GiB")[0] == 0, "no engine can take it"


def test_an_engine_that_does_not_look_is_shown_as_such(engine, capsys, monkeypatch):
    set_clock(monkeypatch, time.monotonic() + 100)
    assert "does not answer" in printed(capsys)[1]


def test_another_pool_is_named(engine, name, capsys, monkeypatch):
    assert printed(capsys, f"1MiB@other{name}"[:37])[0] == 1
    monkeypatch.delenv(HOST_POOL.name)
    assert printed(capsys, f"4MiB@{name}")[0] == 0
    assert engine.look(0, 0.0).limit == 4 * MIB


def test_a_pool_that_is_not_there(name, capsys):
    assert printed(capsys) == (1, f"no engine is in the pool {ledger.home(name)}\n")
    code, text = printed(capsys, "--json")
    assert (code, json.loads(text)) == (
        1,
        {"error": f"no engine is in the pool {ledger.home(name)}"},
    )
    assert printed(capsys, "1GiB")[0] == 1


@pytest.mark.parametrize("size", ["lots", "1GiB@", "1GiB@a/b", "1GiB@../x", "0", "32"])
def test_no_size(size, engine, capsys):
    assert printed(capsys, size)[0] == 2
    assert engine.look(0, 0.0).limit == 8 * MIB


def test_a_pool_of_the_environment_that_is_none(capsys, monkeypatch):
    monkeypatch.setenv(HOST_POOL.name, "bad")
    why = "KVPATCH_HOST_POOL=bad is no size of a pool: it is not a size; use for example 2GiB or"
    for words in ((), ("8GiB",)):
        code, text = printed(capsys, *words)
        assert (code, text.startswith(why)) == (2, True)


def test_a_pool_that_cannot_be_used(name, capsys, monkeypatch):
    monkeypatch.setattr(ledger, "show", raising(ledger.Busy("for ever")))
    code, text = printed(capsys)
    assert code == 2
    assert "Busy: for ever" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64GiB", (64 << 30, "")), ("512MiB@chat", (512 << 20, "chat")), ("100", (100, ""))],
)
def test_sizes_and_names(text, expected):
    assert environ.pool(text) == expected


@pytest.mark.parametrize("text", ["64", "64@chat", "0.5MiB"])
def test_a_pool_that_has_no_part(text):
    with pytest.raises(ValueError, match="no part of a CPU tier is as small"):
        environ.engines_pool(text)
    assert environ.engines_pool("1MiB@chat") == (1 << 20, "chat")


def test_doctor_on_sizes_that_are_refused():
    for settings, had in (({}, "unset"), ({HOST_POOL.name: "8MiB@floor"}, "8 MiB")):
        found = doctor.check({HOST_POOL_FLOOR.name: "9GiB"} | settings)
        assert (found[0].level, found[0].code) == (Level.PROBLEM, "KVP349")
        assert f"is 9.0 GiB, and KVPATCH_HOST_POOL is {had}: no engine" in found[0].what
    assert doctor.check({HOST_POOL_FLOOR.name: "most"}) == []  # reported with the environment


def test_doctor_on_a_pool_that_is_larger_than_the_machine(name):
    memory = HostMemory(shm=4 * MIB, container=None, available=8 * MIB, swap=0)
    assert list(doctor.too_large(4 * MIB, 0, memory)) == []
    (found,) = doctor.too_large(5 * MIB, 4 * MIB, memory)
    assert found.level is Level.WARNING
    assert "is 5 MiB, and beside what its engines have there are 4 MiB for it" in found.what


def test_doctor_says_nothing_where_none_is_asked_for():
    assert doctor.check({}) == []
    assert doctor.check({HOST_POOL.name: "lots"}) == []


def test_doctor_counts_engines(engine, name):
    (found,) = doctor.check({HOST_POOL.name: f"8MiB@{name}"})
    assert found.level is Level.OK
    assert found.what == "1 engines have committed 2 MiB of 8 MiB"
    (found,) = doctor.check({HOST_POOL.name: f"9MiB@{name}"})
    assert found.level is Level.PROBLEM
    assert "started with 8 MiB" in found.what


def test_doctor_on_a_pool_without_engines_and_on_one_that_cannot_be_read(name, monkeypatch):
    (found,) = doctor.check({HOST_POOL.name: f"8MiB@{name}"})
    assert found.what == "no engine is in the pool of 8 MiB"
    monkeypatch.setattr(ledger, "show", raising(ledger.Foreign(ledger.home(name))))
    (found,) = doctor.check({HOST_POOL.name: f"8MiB@{name}"})
    assert found.level is Level.PROBLEM
