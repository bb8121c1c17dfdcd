"""The probe of an NPU: what it asks, what answers come to, and for what its verdict holds."""

import argparse
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import raising

from kvpatch import distributions
from kvpatch.ascend import __main__ as command
from kvpatch.ascend import probe, runtime
from kvpatch.ascend.probe import asking, questions, verdict
from kvpatch.ascend.probe.acl import PAGE, TO_HOST, Refused
from kvpatch.ascend.probe.questions import QUESTIONS, Answer
from kvpatch.ascend.runtime import Runtime
from kvpatch.cli import verify
from kvpatch.environ import VERDICTS

LIBRARY = Path("lib64/libascendcl.so")
START = 1 << 44
HOST = 1 << 20


class Device:
    """A device by the documents, which can do otherwise.

    Attributes:
        apart: every mapping of a handle has memory of its own.
        lost: pieces of batches that are not copied, by number.
        kept: freed memory that stays taken, in bytes.
        late: how often free memory is asked for until that is given back.
    """

    def __init__(self, **otherwise):
        self.apart = otherwise.get("apart", False)
        self.lost = otherwise.get("lost", ())
        self.kept, self.late = otherwise.get("kept", 0), otherwise.get("late", 1 << 30)
        self.left = 1 << 30
        self.handles = {}
        self.mapped = {}  # by page
        self.of_handle = {}
        self.host = {}
        self.reserved = set()

    def free(self):
        self.late -= 1
        if self.late < 0 and not self.handles:
            self.left = 1 << 30
        return self.left

    def reserve(self, size):
        self.reserved.add(START)
        return START

    def release(self, address):
        assert not self.mapped
        self.reserved.remove(address)

    def physical(self, size=PAGE):
        handle = len(self.of_handle) + 1
        self.handles[handle] = size
        self.of_handle[handle] = [bytearray(PAGE) for _ in range(size // PAGE)]
        self.left -= size
        return handle

    def free_physical(self, handle):
        self.left += self.handles.pop(handle) - self.kept

    def map(self, address, handle, size=PAGE):
        for number, memory in enumerate(self.of_handle[handle]):
            page = address // PAGE + number
            assert page not in self.mapped
            self.mapped[page] = bytearray(PAGE) if self.apart else memory

    def unmap(self, address):
        del self.mapped[address // PAGE]

    def pinned(self, size):
        self.host[HOST] = bytearray(size)
        return HOST

    def stream(self):
        return 1

    def synchronize(self, stream):
        pass

    def batch(self, copies, kind, stream):
        for number, (to, of, size) in enumerate(copies):
            if number in self.lost:
                continue
            if kind == TO_HOST:
                self.put(to, self.read(of, size))
            else:
                self.write(to, self.get(of, size))

    def copy_later(self, to, of, size, kind, stream):
        self.put(to, self.read(of, size))

    def write(self, address, text):
        for at, byte in enumerate(text, address):
            self.mapped[at // PAGE][at % PAGE] = byte

    def read(self, address, size):
        page = address // PAGE
        both = self.mapped[page] + self.mapped.get(page + 1, b"")
        return bytes(both[address % PAGE : address % PAGE + size])

    def put(self, address, text):
        self.host[HOST][address - HOST : address - HOST + len(text)] = text

    def get(self, address, size):
        return bytes(self.host[HOST][address - HOST : address - HOST + size])


def asked(question, *more, **otherwise):
    """What a question makes of a device; the device is left as it was found."""
    device = Device(**otherwise)
    answer = question(device, *more)
    assert (device.handles, device.mapped, device.reserved) == ({}, {}, set())
    return answer


def test_a_device_by_the_documents_is_right(monkeypatch):
    monkeypatch.setattr(questions, "TIMED", 4)
    assert asked(questions.addresses, 16).right
    assert asked(questions.batches) == Answer(True, "0 of 6 pieces wrong")
    assert asked(questions.freed).right
    assert asked(questions.times).right
    assert asked(questions.addresses, 16).words.startswith("16 addresses, ")


def test_a_page_that_is_another_at_another_address_is_seen():
    answer = asked(questions.addresses, 16, apart=True)
    assert not answer.right
    assert answer.words.endswith("; they have different bytes")


@pytest.mark.parametrize("piece", range(3))
def test_a_piece_of_a_batch_that_is_not_copied_is_seen_both_ways(piece):
    assert asked(questions.batches, lost=(piece,)) == Answer(False, "2 of 6 pieces wrong")


def test_memory_that_is_freed_late_is_free_and_what_is_kept_is_not(monkeypatch):
    assert asked(questions.freed, kept=PAGE, late=5).right
    monkeypatch.setattr(questions, "FREED_WITHIN", 0.02)
    answer = asked(questions.freed, kept=PAGE)
    assert not answer.right
    assert "2 MiB not given back" in answer.words


def test_what_happens_to_a_page_under_a_copy_is_told_whatever_it_is():
    answer = questions.unmapped(of_pages := Device(), 2)
    assert answer.right
    assert answer.words.endswith("the bytes were right")
    of_pages.synchronize = raising(Refused("the stream failed"))
    of_pages.mapped.clear()
    answer = questions.unmapped(of_pages, 2)
    assert answer.right
    assert "synchronize: the stream failed" in answer.words


@pytest.mark.parametrize("error", [Refused("no such call"), OSError("no library"), KeyError(1)])
def test_an_error_is_a_wrong_answer(monkeypatch, error):
    monkeypatch.setattr(questions, "ACL", raising(error))
    assert questions.ask("times", LIBRARY, 0) == Answer(False, f"{type(error).__name__}: {error}")


def test_without_torch_npu_the_order_of_copies_is_not_asked():
    assert questions.ask("order", LIBRARY, 0) == Answer(None, "torch_npu is not installed")


def test_every_question_is_asked_and_its_answer_said():
    said = []
    words = asking.ask(LIBRARY, 3, said.append, lambda *given: Answer(True, str(given[2])))
    assert list(words) == list(QUESTIONS)
    assert said[0] == "one page at thousands of addresses: right: 3"
    assert said[-1] == "a page unmapped under a copy: seen: 3"


@pytest.mark.parametrize("name", QUESTIONS)
def test_one_wrong_answer_is_a_wrong_probe_unless_it_is_only_told(name):
    answers = {one: Answer(True, "") for one in QUESTIONS}
    assert asking.word(answers) == "right"
    told = name in asking.TOLD_ONLY
    assert asking.word(answers | {name: Answer(False, "")}) == ("right" if told else "wrong")
    assert asking.word(answers | {name: Answer(None, "")}) == ("right" if told else "unfinished")


def answering(monkeypatch, out, err="", code=0):
    ran = []

    def run(command, **how):
        ran.append((command, how))
        return SimpleNamespace(stdout=out, stderr=err, returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    return ran


def test_a_question_has_a_process_without_kvpatch_and_a_limit(monkeypatch):
    monkeypatch.setenv("KVCACHED_CONTIGUOUS_LAYOUT", "true")
    ran = answering(monkeypatch, 'chatter\n[true, "fine"]\n')
    assert asking.in_a_process("times", LIBRARY, 2) == Answer(True, "fine")
    ((words, how),) = ran
    assert words[1:] == ["-m", "kvpatch.ascend.probe.questions", "times", str(LIBRARY), "2"]
    assert (how["env"]["KVPATCH"], how["env"]["KVCACHED_AUTOPATCH"]) == ("0", "0")
    assert "KVCACHED_CONTIGUOUS_LAYOUT" not in how["env"]
    assert how["timeout"] == asking.SECONDS


def test_a_process_that_dies_or_hangs_is_a_wrong_answer(monkeypatch):
    answering(monkeypatch, "", "one\nSegmentation fault\n\n", -11)
    assert asking.in_a_process("times", LIBRARY, 0) == Answer(
        False, "its process ended with -11: Segmentation fault"
    )

    def hangs(command, **how):
        raise subprocess.TimeoutExpired(command, how["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert asking.in_a_process("times", LIBRARY, 0) == Answer(False, "no answer within 60 s")


@pytest.fixture
def cann(tmp_path, monkeypatch):
    """A CANN with its library, a driver and a device."""
    home = tmp_path / "cann"
    for path, text in ((runtime.LIBRARY, "library"), (runtime.HEADER, "header")):
        (home / path).parent.mkdir(parents=True)
        (home / path).write_text(text)
    function = tmp_path / "pci/0000:01"
    function.mkdir(parents=True)
    (function / "vendor").write_text("0x19e5\n")
    (function / "device").write_text("0xd802\n")
    (tmp_path / "pci/0000:02").mkdir()
    (tmp_path / "pci/0000:02/vendor").write_text("0x10de\n")
    (tmp_path / "driver").write_text("Version=25\n")
    monkeypatch.setattr(verdict, "_PCI", tmp_path / "pci")
    monkeypatch.setattr(verdict, "_DRIVER", tmp_path / "driver")
    monkeypatch.setenv(VERDICTS.name, str(tmp_path / "verdicts"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    return Runtime(home, False)


def written(found, word, date, folder):
    verdict.write({"times": Answer(True, "fast")}, word, verdict.machine(found), date, folder)


def test_a_right_verdict_holds_on_its_machine(cann, tmp_path):
    assert verdict.passed(verdict.machine(cann)) == ""
    written(cann, "right", "2026-11-24", tmp_path / "verdicts")
    of = verdict.machine(cann)
    assert (of["devices"], of["driver"], of["emulated"]) == (["0xd802"], "Version=25", False)
    assert verdict.passed(of) == "2026-11-24"


@pytest.mark.parametrize("path", ["cann/lib64/libascendcl.so", "driver", "pci/0000:01/device"])
def test_another_machine_asks_again(cann, tmp_path, path):
    written(cann, "right", "2026-11-24", tmp_path / "verdicts")
    (tmp_path / path).write_text("another")
    assert verdict.passed(verdict.machine(cann)) == ""


def test_an_emulators_verdict_is_none_of_a_device(cann, tmp_path):
    written(cann._replace(emulated=True), "right", "2026-11-24", tmp_path / "verdicts")
    assert verdict.passed(verdict.machine(cann)) == ""


def test_the_newest_counts_and_of_one_day_the_wrong_one(cann, tmp_path):
    own, named = tmp_path / "data/kvpatch/verdicts", tmp_path / "verdicts"
    written(cann, "wrong", "2026-11-23", own)
    written(cann, "right", "2026-11-24", named)
    assert verdict.passed(verdict.machine(cann)) == "2026-11-24"
    written(cann, "wrong", "2026-11-24", own)  # in the place of its first
    assert verdict.passed(verdict.machine(cann)) == ""
    assert len(list(own.rglob("*.json"))) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"date": 1, "verdict": "right"}', '"right"'])
def test_a_file_that_is_no_verdict_lifts_nothing(cann, tmp_path, text):
    (tmp_path / "verdicts/npu").mkdir(parents=True)
    (tmp_path / "verdicts/npu/probe.json").write_text(text)
    assert verdict.passed(verdict.machine(cann)) == ""


def answers(**changes):
    return lambda library, device, say: {one: Answer(True, "") for one in QUESTIONS} | changes


def test_the_command_writes_a_verdict_which_start_up_reads(cann, tmp_path, monkeypatch, capsys):
    from kvpatch.patches.ascend import presence

    monkeypatch.setattr(asking, "ask", answers())
    assert presence._passed() == ""
    assert command.probe(0, tmp_path / "verdicts") == 0
    assert presence._passed() != ""
    assert capsys.readouterr().out.endswith("no engine of kvpatch's tests has run on an NPU\n")
    monkeypatch.setattr(asking, "ask", answers(freed=Answer(False, "kept")))
    assert command.probe(0, tmp_path / "verdicts") == 1
    assert presence._passed() == ""


def test_a_probe_that_is_not_finished_leaves_no_verdict(cann, tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "ask", answers(order=Answer(None, "no torch_npu")))
    assert command.probe(0, tmp_path / "verdicts") == 3
    assert not (tmp_path / "verdicts").exists()


def test_without_a_runtime_nothing_is_asked(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "find", lambda: None)
    assert command.probe(0, None) == 3
    assert "CANN was not found" in capsys.readouterr().err


def verifying(monkeypatch, tmp_path, status):
    """What ``kvpatch verify`` ran; the probe's status is None where there is no vllm-ascend."""
    ran = []
    monkeypatch.setattr(probe, "needed", lambda: status is not None)
    monkeypatch.setattr(probe, "run", lambda *given: ran.append("the probe") or status)

    def running(*given):
        ran.append("the command")
        raise KeyboardInterrupt

    monkeypatch.setattr(verify.running, "run", running)
    monkeypatch.setattr(verify.signal, "signal", lambda *given: None)
    options = argparse.Namespace(words=["--", sys.executable, "serve"], logs=tmp_path / "logs")
    options.plain, options.start_seconds, options.verdicts = True, 1.0, None
    with suppress(KeyboardInterrupt):
        ran.append(verify.run(options))
    return ran


@pytest.mark.parametrize(
    ("status", "ran"),
    [
        (0, ["the probe", "the command"]),
        (1, ["the probe", 3]),
        (3, ["the probe", 3]),
        (None, ["the command"]),
    ],
    ids=["right", "wrong", "unfinished", "no NPU"],
)
def test_verify_begins_with_the_probe_where_vllm_ascend_is(monkeypatch, tmp_path, status, ran):
    assert verifying(monkeypatch, tmp_path, status) == ran


def test_the_probe_runs_as_an_operator_runs_it(monkeypatch, tmp_path):
    ran = answering(monkeypatch, "", code=1)
    assert probe.run({"KVPATCH": "1", "A": "b"}, tmp_path) == 1
    ((words, how),) = ran
    assert words == [
        *(sys.executable, "-m", "kvpatch.ascend", "probe"),
        *("--verdicts", str(tmp_path)),
    ]
    assert how["env"] == {"KVPATCH": "0", "A": "b"}


def test_an_npu_is_where_vllm_ascend_is_installed(monkeypatch):
    asked_for = []
    assert distributions.probes() == (probe,)
    assert probe.needed() is False
    monkeypatch.setattr(distributions.metadata, "version", asked_for.append)
    assert probe.needed() is True
    assert asked_for == ["vllm-ascend"]


def test_the_answers_survive_their_file(cann, tmp_path):
    path = verdict.write({"times": Answer(None, "x")}, "wrong", {"a": 1}, "2026-11-24", tmp_path)
    assert json.loads(path.read_text())["answers"] == {"times": {"right": None, "words": "x"}}
