"""Verdict files: for what they hold, and what they lift."""

import json
import os
from types import SimpleNamespace

import pytest
from fakes import facts, raising

from kvpatch import rules, verdicts
from kvpatch.cli import matrix, status
from kvpatch.doctor import Level, verified
from kvpatch.environ import VERDICTS, VERIFIED, VERIFY
from kvpatch.masking import masked
from kvpatch.patches.elastic_memory import lifting
from kvpatch.refusal import CODES, VERIFIABLE, VERIFY_IT, Basis, Refusal
from kvpatch.status import Record
from kvpatch.telemetry import status_page
from kvpatch.telemetry.reader import Seen, State
from kvpatch.upstream import combination
from kvpatch.verdicts import Verified
from kvpatch.versions import Installed

RAN = {
    "versions": {"vllm": "0.28.0", "kvcached": "0.1.6"},
    "code": {"kvpatch": "abc"},
    "device": "cuda NVIDIA H100",
    "model": {"architecture": "Llama", "shape": "def"},
    "flags": {"cache_config.cache_dtype": "fp8"},
}


def content(word="right", date="2026-11-22", **changes):
    return {
        "verdict": word,
        "date": date,
        "command": ["vllm", "serve", "m"],
        "lifted": ["KVP310"],
        "combination": RAN,
        **changes,
    }


def written(folder, *every):
    return [verdicts.read(verdicts.write(folder, one)) for one in every]


def changed(part, name, value):
    return RAN | {part: {**RAN[part], name: value}}


ANOTHER_SHAPE = changed("model", "shape", "deg")


@pytest.fixture
def settings(tmp_path):
    """The settings that name the verdicts of a test."""
    return {VERDICTS.name: str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "none")}


def test_nobody_else_reads_a_verdict(tmp_path):
    path = verdicts.write(tmp_path / "kvpatch/verdicts", content())
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert verdicts.write(path.parent, content("wrong")) == path
    assert verdicts.read(path).word == "wrong"


def test_a_verdict_without_its_secrets_holds_for_what_has_them(tmp_path):
    ran = changed("flags", "extra_config", {"store_config": {"secret_key": "S"}})
    known = written(tmp_path, content(combination=masked(ran)))
    assert '"S"' not in known[0].path.read_text()
    assert verdicts.covering(ran, ["KVP310"], known) == known[0]
    other = changed("flags", "extra_config", {"other_config": {"secret_key": "S"}})
    assert verdicts.covering(other, ["KVP310"], known) is None


def unused(settings, path, why):
    """Check that a file is no verdict, and that doctor says why; return what to do about it."""
    assert verdicts.every(settings) == []
    (finding,) = verified.check(settings)
    assert finding.level is Level.WARNING
    assert finding.what == f"{path} is not used: {why}"
    return finding.remedy


@pytest.mark.fault(
    "a verdict is of an earlier kvpatch, which compared fewer settings",
    "it holds for nothing, and `kvpatch doctor` says so",
)
def test_a_verdict_of_an_earlier_kvpatch_holds_for_nothing_and_doctor_says_why(settings, tmp_path):
    path = verdicts.write(tmp_path, content())
    path.write_text(json.dumps({"format": 1, **content()}))
    lacks = "an earlier kvpatch made it, and it lacks settings that decide which code runs"
    assert unused(settings, path, lacks) == "remove it, and verify its command again"


def kept(*words, **changes):
    return json.dumps({"format": verdicts.FORMAT, **content(*words, **changes)})


def without(part):
    return {name: of for name, of in RAN.items() if name != part}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not JSON"),
        ("{bad", "it is not JSON"),
        ("[]", "it is no verdict (list indices must be integers or slices, not str)"),
        ("{}", "it is no verdict, and lacks 'format'"),
        ('{"format": 9}', "its format is 9, and this kvpatch has 2"),
        (kept(None), "it is no verdict"),
        (kept(date="today"), "it is no verdict"),
        (kept(command=[1]), "it is no verdict"),
        (kept(lifted=[["KVP310"]]), "it is no verdict (unhashable type: 'list')"),
        (kept(combination=RAN | {"versions": ["0.28.0"]}), "it is no verdict"),
        (kept(combination=without("device")), "it is no verdict, and lacks 'device'"),
        (kept(combination=without("code")), "it is no verdict, and lacks 'code'"),
    ],
)
def test_what_a_file_lacks_is_said_once_and_it_lifts_nothing(settings, tmp_path, caplog, text, why):
    path = tmp_path / "broken.json"
    path.write_text(text)
    for _ in range(2):
        unused(settings, path, why)
    said = f"kvpatch: the verdict {path} is not used: {why}"
    assert [one.getMessage() for one in caplog.records] == [said]


def test_nested_text_is_no_verdict(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="it is no verdict"):
        verdicts.read(path)
    path.write_text(f'"{"x" * verdicts.LONGEST}"')
    with pytest.raises(OSError, match="more than"):
        verdicts.read(path)


def test_a_file_that_others_can_write_is_nobodys_verdict(tmp_path, monkeypatch):
    path = verdicts.write(tmp_path, content())
    link = tmp_path / "mounted.json"
    link.symlink_to(path)  # as Kubernetes mounts them
    assert verdicts.read(link).word == "right"
    path.chmod(0o620)
    with pytest.raises(OSError, match="can be written by other users"):
        verdicts.read(path)
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid:
        with pytest.raises(OSError, match="belongs to"):
            verdicts.read(path)
    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(OSError, match="instead of a file"):
        verdicts.read(tmp_path / "fifo.json")
    with pytest.raises(OSError, match="is a folder instead of a file"):
        verdicts.read(tmp_path)


def test_a_user_without_a_home_has_no_verdicts(monkeypatch):
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(verdicts.Path, "expanduser", raising(RuntimeError))
    assert verdicts.every({}) == []
    assert verdicts.early({}) == frozenset()
    with pytest.raises(OSError, match="no home"):
        verdicts.own_folder({})


def test_a_folder_that_cannot_be_read_is_said(settings, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(verdicts.Path, "iterdir", raising(PermissionError(13, "denied", "x")))
    assert verdicts.every(settings) == []
    assert f"the verdicts of {tmp_path} are not used" in caplog.text


def test_doctor_shows_no_control_characters_of_a_verdict(settings, tmp_path):
    written(tmp_path, content(command=["\x1b]0;x\x07"], combination=RAN | {"device": "d\x1b[2J"}))
    (finding,) = verified.check(settings)
    assert finding.what.isprintable()


def test_a_verdict_holds_for_its_combination_and_what_was_lifted_in_its_run(tmp_path):
    known = written(tmp_path, content())
    assert verdicts.covering(json.loads(json.dumps(RAN)), ["KVP310"], known) == known[0]
    assert verdicts.covering(RAN, [], known) == known[0]
    assert verdicts.covering(RAN, ["KVP310", "KVP309"], known) is None
    (known,) = written(tmp_path, content(lifted=["KVP310", "KVP304", "KVP302"]))
    assert known.lifted == {"KVP310"}  # what is incompatible is not lifted by any file
    nameless = RAN | {"device": ""}  # which is no device
    known = written(tmp_path, content(combination=nameless))
    assert verdicts.covering(nameless, [], known) is None


@pytest.mark.parametrize(
    "other",
    [
        changed("versions", "vllm", "0.28.1"),
        changed("versions", "kvcached", "0.1.7"),
        changed("code", "kvpatch", "abd"),
        ANOTHER_SHAPE,
        changed("flags", "cache_config.cache_dtype", "auto"),
        changed("flags", "parallel_config.tensor_parallel_size", 2),
        RAN | {"device": "cuda NVIDIA A100"},
        RAN | {"device": ""},
    ],
)
def test_what_changed_asks_again(tmp_path, other):
    assert verdicts.covering(other, ["KVP310"], written(tmp_path, content())) is None


def test_a_wrong_one_lifts_nothing_and_the_newest_counts(tmp_path):
    (wrong,) = written(tmp_path / "a", content("wrong"))
    (earlier,) = written(tmp_path / "b", content(date="2026-11-21"))
    (same_day,) = written(tmp_path / "c", content())
    (later,) = written(tmp_path / "d", content(date="2026-11-23"))
    assert verdicts.covering(RAN, [], [wrong]) is None
    assert verdicts.covering(RAN, [], [wrong, earlier]) is None
    assert verdicts.covering(RAN, [], [same_day, wrong]) is None
    assert verdicts.covering(RAN, [], [wrong, later]) == later


def test_a_folder_that_the_operator_names_is_read_besides_the_users_own(tmp_path):
    here = {VERDICTS.name: str(tmp_path / "named"), "XDG_DATA_HOME": str(tmp_path)}
    written(tmp_path / "named", content())
    written(tmp_path / "kvpatch/verdicts", content(date="2026-11-23"))
    assert [one.date for one in verdicts.every(here)] == ["2026-11-22", "2026-11-23"]


def test_before_the_configuration_is_known_the_versions_decide(settings, tmp_path, monkeypatch):
    installed = {name: [Installed.release(name, of)] for name, of in RAN["versions"].items()}
    monkeypatch.setattr(verdicts.versions, "installed", lambda package: installed[package])
    assert verdicts.early(settings) == frozenset()
    written(tmp_path, content())
    assert verdicts.early(settings) == {"KVP310"}
    written(tmp_path, content("wrong"))  # over it
    assert verdicts.early(settings) == frozenset()
    written(tmp_path, content())
    installed["vllm"] = [Installed.release("vllm", "0.28.1")]
    assert verdicts.early(settings) == frozenset()
    assert verdicts.early({VERIFY.name: "/run"}) == VERIFIABLE


def test_vllms_own_processes_inherit_a_verdict(monkeypatch):
    monkeypatch.setenv(VERIFIED.name, "")
    verdict = Verified("2026-11-22", frozenset({"KVP310", "KVP107"}))
    verdicts.pass_on(verdict)
    assert os.environ[VERIFIED.name] == "2026-11-22:KVP107,KVP310"
    for started in (False, True):
        monkeypatch.setattr(verdicts, "started_by_multiprocessing", lambda found=started: found)
        assert verdicts.inherited() == (verdict if started else None)
    verdicts.pass_on(None)
    assert verdicts.inherited() is None
    assert VERIFIED.name not in os.environ


def test_digests_are_of_files_and_import_nothing(tmp_path, monkeypatch):
    (tmp_path / "found/part").mkdir(parents=True)
    (tmp_path / "found/__init__.py").write_text("raise ImportError")
    for name in ("found/part/one.py", "found/part/_C.abi3.so", "found/data.json", "alone.py"):
        (tmp_path / name).write_text("a")
    monkeypatch.syspath_prepend(tmp_path)
    found = [verdicts.digest(name) for name in ("found", "alone")]
    for name, differs in (("part/one.py", True), ("part/_C.abi3.so", True), ("data.json", False)):
        (tmp_path / "found" / name).write_text("b")
        assert (verdicts.digest("found") != found[0]) is differs
        (tmp_path / "found" / name).write_text("a")
    (tmp_path / "alone.py").write_text("b")
    assert verdicts.digest("alone") not in ("", found[1])
    assert verdicts.digest("nowhere") == ""


def test_what_of_kvpatch_is_not_in_an_engines_way_is_not_its_code(tmp_path, monkeypatch):
    for name in ("gate.py", "patches/fence.py", "doctor/memory.py"):
        (tmp_path / "kvpatch" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "kvpatch" / name).write_text("a")
    monkeypatch.setattr(verdicts, "PACKAGE", tmp_path / "kvpatch")
    before = verdicts.digest("kvpatch")
    (tmp_path / "kvpatch/doctor/memory.py").write_text("b")
    assert verdicts.digest("kvpatch") == before
    (tmp_path / "kvpatch/patches/fence.py").write_text("b")
    assert verdicts.digest("kvpatch") != before


def test_only_what_is_not_validated_can_be_verified():
    assert {CODES[code].basis for code in VERIFIABLE} == {Basis.NOT_VALIDATED}
    assert {"KVP107", "KVP310", "KVP341", "KVP344", "KVP406"} <= VERIFIABLE
    cannot = {"KVP203", "KVP302", "KVP306", "KVP319", "KVP322", "KVP325", "KVP330", "KVP331"}
    assert not VERIFIABLE & cannot


@pytest.mark.parametrize(
    ("code", "named"), [("KVP310", True), ("KVP302", False), ("KVP404", False)]
)
def test_the_sentence_names_the_command_that_would_lift_it(code, named):
    refusal = Refusal("a", "b", "c", code=code)
    assert (VERIFY_IT in str(refusal)) is named
    assert refusal.remedy == "c"


@pytest.fixture
def process(settings, monkeypatch):
    """A process with a configuration that KVP310 refuses; returns what decides for it."""
    broken = [Refusal("fp8", "b", "c", code="KVP310")]
    monkeypatch.setattr(rules, "refusals", lambda *_: iter(broken))
    monkeypatch.setattr(combination, "of", lambda *_: RAN)
    monkeypatch.setattr(combination, "workers", lambda config: 2)
    record = Record()
    monkeypatch.setattr(lifting, "record", record)
    monkeypatch.setenv(VERIFIED.name, "")

    def decide(vllm="0.28.0", config=None, **more):
        lifting.decide(config or plain(), facts(vllm, environment=settings | more))
        return record

    decide.refuses = lambda code: broken.append(Refusal("more", "b", "c", code=code))
    return decide


def plain():
    parts = {"cache_config": SimpleNamespace(), "scheduler_config": SimpleNamespace()}
    return SimpleNamespace(kv_transfer_config=None, **parts)


def test_a_verdict_lifts_and_says_when_it_was_made(process, tmp_path):
    record = process()
    assert record.skipped == frozenset()
    assert "verified" not in record.line()
    written(tmp_path, content())
    record = process()
    assert record.skipped == {"KVP310"}
    assert record.line().endswith("; verified here on 2026-11-22")
    assert record.describe()["verified"] == "2026-11-22"
    assert os.environ[VERIFIED.name] == "2026-11-22:KVP310"


def test_a_verdict_that_does_not_hold_says_in_what_it_is_another(process, tmp_path, caplog):
    (near,) = written(tmp_path, content(combination=changed("flags", "max_num_seqs", 8)))
    far = changed("flags", "max_num_seqs", 8) | {"device": "cpu"}
    written(tmp_path, content(combination=far), content(combination=far, lifted=[]))
    assert process().skipped == frozenset()
    assert f"the verdict {near.path} does not hold here: max_num_seqs is None and was 8" in (
        caplog.text
    )
    assert caplog.text.count("does not hold here") == 1


@pytest.mark.parametrize(
    ("combination", "more", "said"),
    [
        (changed("versions", "torch", "2.13.0"), {}, "torch is None and was 2.13"),
        (ANOTHER_SHAPE, {}, "the shape of the model is another"),
        (changed("code", "mine", "abd"), {}, "the code of mine is another"),
        (RAN | {"device": "cpu"}, {}, "the device is 'cuda NVIDIA H100' and was"),
        (changed("model", "architecture", "Gemma"), {}, None),
        (ANOTHER_SHAPE, {"word": "wrong"}, None),
        (ANOTHER_SHAPE, {"lifted": []}, None),
    ],
)
def test_what_is_another_is_said_of_a_right_one_on_such_a_model(
    process, tmp_path, caplog, combination, more, said
):
    written(tmp_path, content(combination=combination, **more))
    assert process().skipped == frozenset()
    assert (said or "") in caplog.text
    assert ("does not hold here" in caplog.text) is bool(said)


def test_a_wrong_one_after_a_right_one_is_said(process, tmp_path, caplog):
    (right,) = written(tmp_path, content(date="2026-11-21"))
    right.path.rename(tmp_path / "right.json")
    written(tmp_path, content("wrong"))
    assert process().skipped == frozenset()
    assert "right.json does not hold here: a wrong one has taken its place" in caplog.text


def test_the_next_engine_of_a_program_is_asked_for_again(process, tmp_path):
    written(tmp_path, content())
    config = plain()
    process(config=config)
    process.refuses("KVP309")
    # vLLM makes the configuration of its text model from that of a model that sees.
    part = SimpleNamespace(**vars(config) | {"cache_config": SimpleNamespace()})
    assert process(config=part).skipped == {"KVP310"}
    assert process().skipped == frozenset()
    assert VERIFIED.name not in os.environ


def test_a_programs_own_process_does_not_inherit_for_another_engine(process, tmp_path, monkeypatch):
    """A program may start an engine in a process of its own, beside one that is verified."""
    written(tmp_path, content())
    process()
    monkeypatch.setattr(verdicts, "started_by_multiprocessing", lambda: True)
    lifting.record.verified = verdicts.inherited()
    assert lifting.record.skipped == {"KVP310"}
    process.refuses("KVP309")
    assert process().skipped == frozenset()


def test_a_release_is_verified(process, tmp_path, monkeypatch):
    other = changed("versions", "vllm", "0.33.1")
    written(tmp_path, content(lifted=["KVP107", "KVP310"], combination=other))
    with pytest.raises(Refusal, match=r"vllm 0\.33\.1 is not a validated release"):
        process("0.33.1")  # for another configuration
    monkeypatch.setattr(combination, "of", lambda *_: other)
    assert process("0.33.1").skipped == {"KVP107", "KVP310"}
    with pytest.raises(Refusal, match="KVP107"):  # its verdict was of a run that was allowed
        written(tmp_path, content(lifted=["KVP310"], combination=other))
        process("0.33.1")


def test_a_run_writes_down_what_runs_and_what_was_lifted(process, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv(VERIFY.name, str(folder))
    process.refuses("KVP312")
    record = process("0.33.1", **{VERIFY.name: str(folder)})
    assert record.skipped == VERIFIABLE
    assert record.line().endswith("; runs to be verified")
    assert json.loads((folder / "combination.json").read_text()) == {
        "combination": RAN,
        "workers": 2,
        "connectors": 0,
    }
    assert (folder / "lifted").read_text() == "KVP107\nKVP310\n"
    process("0.33.1", **{VERIFY.name: str(folder)})  # of a part of the model, for example
    assert (folder / "lifted").read_text() == "KVP107\nKVP310\n"
    assert lifting.lifts(Refusal("a", "b", "c", code="KVP406"))
    assert not lifting.lifts(Refusal("a", "b", "c", code="KVP312"))
    assert (folder / "lifted").read_text() == "KVP107\nKVP310\nKVP406\n"


@pytest.fixture
def here(settings, monkeypatch):
    """A machine with what ``RAN`` names; returns the settings that name the verdicts."""
    monkeypatch.setattr(verified, "_version", lambda name: RAN["versions"][name])
    monkeypatch.setattr(verdicts, "digest", lambda package: "abc")
    return settings


@pytest.mark.parametrize(
    ("verdict", "level", "what", "remedy"),
    [
        (
            "right",
            Level.OK,
            "vllm serve m was right on 2026-11-22, on cuda NVIDIA H100; it lifts KVP310",
            "",
        ),
        ("wrong", Level.WARNING, "", "report it, or run kvpatch verify -- vllm serve m"),
        ("no verdict", Level.WARNING, "a.json is not used", ""),
        ("no folder", Level.WARNING, "which is no folder", ""),
    ],
)
def test_doctor_shows_a_verdict(here, tmp_path, verdict, level, what, remedy):
    if verdict == "no verdict":
        (tmp_path / "a.json").write_text("{")
    elif verdict == "no folder":
        here = {**here, VERDICTS.name: str(tmp_path / "gone")}
    else:
        written(tmp_path, content(verdict))
    (finding,) = verified.check(here)
    assert finding.level is level
    assert what in finding.what
    assert remedy in finding.remedy


def test_doctor_shows_what_is_stale_and_how_to_renew_it(here, tmp_path, monkeypatch):
    written(tmp_path, content())
    monkeypatch.setattr(verdicts, "digest", lambda package: "abd")
    (finding,) = verified.check(here)
    assert finding.level is Level.NOTE
    assert finding.what.endswith("; it holds no more, because kvpatch has changed")
    assert finding.remedy == "run kvpatch verify -- vllm serve m"
    monkeypatch.setattr(verified, "_version", lambda name: "0.1.6")
    (finding,) = verified.check(here)
    assert finding.what.endswith("because vllm 0.28.0 is now 0.1.6")


def test_status_shows_when_an_engine_was_verified(monkeypatch):
    page = status_page.Page(7, "0.1.0", {"verified": "2026-11-22"})
    assert "  verified  here on 2026-11-22" in status.block(Seen(7, State.RUNS, "", page))


def test_the_matrix_shows_verdicts_in_a_place_of_their_own(tmp_path, monkeypatch):
    assert matrix.verified() == ""
    monkeypatch.setenv(VERDICTS.name, str(tmp_path))
    written(tmp_path, content())
    head, line = matrix.verified().strip().splitlines()
    assert head == "verified here"
    assert line == "2026-11-22  right  vLLM 0.28.0  cuda NVIDIA H100  vllm serve m"
