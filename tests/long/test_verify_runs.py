"""``kvpatch verify`` from its command line to its verdict, on a stand-in for vLLM's server.

Each oracle is made to fail once.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpatch import cli, host_memory, verdicts
from kvpatch.pool import ledger
from kvpatch.pool.record import Limit
from kvpatch.verify import child, compare, drive, judge, limit, plain, report
from kvpatch.verify import run as running
from kvpatch.verify.api import Answer, Api

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def verify(tmp_path, monkeypatch, capsys):
    """Run the command with a fault; return its exit code, its output and its verdict."""
    logs = tmp_path / "logs"

    def move(pool: str, size: int) -> None:
        assert pool == "pool"
        (logs / "limit").write_text(str(size))

    def move_pool(folder: Path, size: int) -> None:
        assert folder.name.endswith(f"-verify{os.getpid()}")
        with (logs / "pool").open("a") as file:
            file.write(f"{size}\n")

    monkeypatch.setattr(limit, "move", move)
    monkeypatch.setattr(ledger, "set_limit", move_pool)
    monkeypatch.setattr(ledger, "show", lambda folder: (Limit(1 << 30, 1 << 30), []))
    monkeypatch.setattr(drive, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(drive, "IDLE_SECONDS", 1.0)

    def run(*options: str, more: Sequence[str] = (), **environment: str):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        where = tmp_path / "verdicts"
        words = ["verify", "--logs", str(logs), "--verdicts", str(where), *options, "--"]
        words += [sys.executable, str(FAKE), "serve", "model", "--kv-offloading-size", "1", *more]
        code = cli.main(words)
        found = [verdicts.read(path) for path in where.glob("*.json")]
        return code, capsys.readouterr().out, found[0] if found else None

    run.logs = logs
    return run


def test_a_right_command_gets_a_verdict(verify):
    code, out, verdict = verify()
    assert code == 0, out
    assert verdict.word == "right"
    assert verdict.lifted == {"KVP310"}
    assert verdict.command[2:] == ("serve", "model", "--kv-offloading-size", "1")
    content = json.loads(verdict.path.read_text())
    assert content["wrong"] == []
    assert content["measured"]["bytes loaded"] > 0
    assert content["compared with plain vLLM"] is True
    assert "RIGHT: this command starts on this machine" in out
    said = "fence: 16 pages freed, of which 13 waited for a plan and 2 for a transfer"
    assert said in content["right"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("bytes", "a load brought other bytes than were stored: block 7 of page 1, job 3"),
        ("unmapping", "a page is unmapped under a transfer: block 7 of page 1, job 3"),
        ("memory", "memory was not given back"),
        ("tokens", "an answer is not plain vLLM's: conversation"),
        ("log-probabilities", "log-probabilities are 0.5 apart"),
        ("an error", "ValueError: an engine has failed"),
    ],
)
def test_what_is_wrong_is_said_and_lifts_nothing(verify, fault, said):
    code, out, verdict = verify(FAULT=fault)
    assert code == 1, out
    (line,) = [line for line in out.splitlines() if line.startswith("  WRONG")][:1]
    assert said in line
    assert "WRONG: this command stays refused; report it with the logs" in out
    assert verdict.word == "wrong"
    assert verdicts.covering(verdict.combination, (), [verdict]) is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nothing restored", "nothing was restored"),
        ("nothing preempted", "nothing was preempted"),
        ("a silent worker", "1 of 2 workers restored nothing"),
    ],
)
def test_what_was_not_seen_is_no_verdict(verify, fault, said):
    code, out, verdict = verify(FAULT=fault)
    assert code == 3, out
    assert f"  missing  {said}" in out
    assert verdict is None


SLEEPS = {"more": ["--enable-sleep-mode"]}
POOLED = {"KVPATCH_HOST_POOL": "1GiB@mine"}  # which is the operator's, and stays as it is


def test_a_command_that_sleeps_or_has_a_host_pool_does_both_in_the_run(verify):
    code, out, verdict = verify(**SLEEPS, **POOLED)
    assert code == 0, out
    assert verdict.word == "right"
    (said,) = [line for line in out.splitlines() if line.startswith("  ok       seen: ")]
    counts = dict(part.rsplit(" ", 1) for part in said.partition("seen: ")[2].split(", "))
    every = {f"restored after a sleep of level {level}" for level in (1, 2)}
    every |= {f"{what} by the host pool" for what in ("taken back", "given again")}
    every |= {"restored from memory that was taken back"}
    assert every <= {name for name, count in counts.items() if int(count)}


@pytest.mark.parametrize(
    ("more", "fault"), [(SLEEPS, "bytes since a sleep"), (POOLED, "bytes since the pool")]
)
def test_what_only_a_sleep_or_the_pool_makes_wrong_is_found(verify, more, fault):
    assert verify(FAULT=fault)[2].word == "right"
    shutil.rmtree(verify.logs)
    code, out, verdict = verify(FAULT=fault, **more)
    assert code == 1, out
    assert "  WRONG    kvpatch KVPATCH_DEBUG: a load brought other bytes" in out
    assert verdict.word == "wrong"


@pytest.mark.parametrize("what", ["taken back", "given again"])
def test_a_pool_of_which_that_was_not_seen_gets_no_verdict(verify, what):
    code, out, _ = verify(FAULT=f"nothing {what}", **POOLED)
    assert code == 3, out
    assert f"  missing  nothing was {what} by the host pool" in out


def test_memory_that_a_pool_took_back_must_be_free(verify, monkeypatch):
    monkeypatch.setattr(judge, "SEEN_FREE", 1)
    monkeypatch.setattr(host_memory, "here", lambda: SimpleNamespace(available=1 << 30))
    code, out, _ = verify(**POOLED)
    assert code == 3, out
    assert "were taken back by the host pool, and the free memory of this machine grew by 0" in out


def test_a_command_that_is_refused_ends_with_the_refusal(verify):
    code, out, verdict = verify(FAULT="a refusal")
    assert code == 3
    assert "kvpatch refuses to start vLLM: a, because b; c. [KVP404]" in out
    assert verdict is None


def test_without_plain_answers_are_not_compared(verify):
    code, out, verdict = verify("--no-plain", FAULT="tokens")
    assert code == 0, out
    assert "plain vLLM" not in out
    assert json.loads(verdict.path.read_text())["compared with plain vLLM"] is False


def test_a_wrong_verdict_takes_the_place_of_a_right_one(verify, tmp_path):
    assert verify()[2].word == "right"
    (tmp_path / "logs").rename(tmp_path / "earlier")
    assert verify(FAULT="memory")[2].word == "wrong"
    assert len(list((tmp_path / "verdicts").iterdir())) == 1


def test_the_noise_of_plain_vllm_is_allowed(verify):
    """Its own answers are as far apart as ours are from it."""
    code, out, _ = verify(FAULT="noise", PLAIN_FAULT="")
    assert code == 0, out


def test_a_folder_of_logs_that_is_used_is_refused(verify, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/kvpatch.log").touch()
    assert verify()[0] == 2


@pytest.mark.parametrize("words", [[], ["--"]])
def test_without_a_command_nothing_runs(words, capsys):
    assert cli.main(["verify", *words]) == 2
    assert "no command was given" in capsys.readouterr().out


def test_a_command_needs_no_dashes_before_it(tmp_path, capsys):
    assert cli.main(["verify", "--logs", str(tmp_path), "false", "serve", "--tp", "2"]) == 3
    out = capsys.readouterr().out
    assert "false serve --tp 2" in out
    assert "bytes stored" not in out  # nothing ran that could be measured


def test_what_was_lifted_by_nothing_is_run_without_kvpatch():
    wrong = running.Result(judge.Judgement(["a"]))
    assert report.text(wrong).endswith(
        "run this command with KVPATCH=0, and report it with the logs"
    )


def test_a_command_that_is_not_there(tmp_path):
    missing = child.Child(["/nowhere/vllm"], {}, tmp_path / "log")
    with pytest.raises(child.Unfinished, match="/nowhere/vllm cannot be started"), missing:
        pass


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("vllm serve m --kv-offloading-size 1 -tp 2", "vllm serve m -tp 2"),
        ("vllm serve m --kv_offloading_size=1", "vllm serve m"),
        ("vllm serve --kv-transfer-config {} m", "vllm serve m"),
        ("vllm serve m --kv-transfer-config.kv_connector X --x y", "vllm serve m --x y"),
        ("vllm serve m --kv-offloading-backend native --flag", "vllm serve m --flag"),
        ("vllm serve m --kv-cache-dtype fp8", "vllm serve m --kv-cache-dtype fp8"),
    ],
)
def test_plain_vllm_gets_everything_but_offloading(command, left):
    assert plain.command_of(command.split()) == left.split()


def test_plain_vllm_has_neither_kvpatch_nor_kvcached():
    given = {"KVPATCH": "1", "KVPATCH_DEBUG": "1", "ENABLE_KVCACHED": "1", "VLLM_X": "1"}
    assert plain.environment_of(given) == {"KVPATCH": "0", "VLLM_X": "1"}


def answer(*tokens: str, top: dict[str, float] | None = None) -> Answer:
    every = [{token: -1.0} | (top or {}) for token in tokens]
    return Answer("a", tokens=list(tokens), top=every)


def test_a_token_that_is_not_likely_is_far_apart():
    found = compare.difference(answer("x", "y"), answer("x", "z"))
    assert (found.at, found.gap) == (2, math.inf)
    near = compare.difference(answer("x", "y", top={"z": -1.5}), answer("x", "z"))
    assert (near.at, near.gap, near.apart) == (2, 0.5, 0.0)
    assert compare.noise([found, near]) == 0.5
    assert compare.allowed([found]) == compare.FLOOR


def test_what_follows_a_token_that_differs_is_not_compared():
    expected, got = answer("x", "y", "z"), answer("w", "y", "z", top={"x": -1.0})
    got.top[1] = {"y": -9.0}
    assert compare.difference(expected, got).apart == 0.0


def test_an_audit_that_does_not_report_is_missed():
    audit = {"stored": 1, "loaded": 1, "unverified": 0, "named": 1}
    assert judge.judge_bytes([audit, audit], 2, 1).missing == []
    assert "1 audits of copies reported" in judge.judge_bytes([audit], 2, 1).missing[0]
    assert judge.judge_bytes([], 1, 0).missing == []


def test_the_key_of_a_server_is_read():
    command = "vllm serve m --api-key a b --tp 2 --hf-token=c --x"
    assert running.api_key(command.split(), {}) == "a"
    assert running.api_key(["--api-key=z"], {}) == "z"
    assert running.api_key(["vllm"], {"VLLM_API_KEY": "k"}) == "k"


def test_a_server_that_is_gone_has_ended():
    gone = Api(child.free_port())
    assert not gone.healthy()
    for ask in (gone.look, gone.metrics, gone.reset, lambda: gone.complete("a", "b", 1)):
        with pytest.raises(child.Ended):
            ask()
