"""The ``kvpatch`` command itself: its subcommands, and what it leaves alone."""

import importlib
import os
import sys
from pathlib import Path

import pytest

import kvpatch
from kvpatch import cli
from kvpatch.cli import completion
from kvpatch.verify import run as running
from kvpatch.verify.judge import Judgement

ROOT = Path(__file__).parents[2]
NO_SIZE = "it is not a size; use for example 2GiB or 512MiB\n"
NO_TIME = "it is not a number of seconds; use for example 10 or 0.5\n"


def test_it_says_its_version(run):
    done = run(sys.executable, "-m", "kvpatch", "--version")
    assert (done.code, done.out) == (0, f"kvpatch {kvpatch.__version__}\n")


def test_help_names_every_subcommand_and_imports_none(run):
    code = """
import sys
from kvpatch import cli
try:
    cli.main(["--help"])
finally:
    print([name for name in sys.modules if name.startswith("kvpatch.cli.")])
"""
    done = run(sys.executable, "-c", code, PYTHONPATH=ROOT)
    assert done.code == 0
    assert done.out.endswith("[]\n")
    for command in cli.COMMANDS:
        assert command.name in done.out
        assert command.help in done.out


def test_nothing_asked_for_is_answered_with_the_help(run):
    done = run(sys.executable, "-m", "kvpatch")
    assert done.code == 2
    assert all(command.help in done.err for command in cli.COMMANDS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["size", "x", "--teir", "64"],
            "kvpatch size: error: unrecognized arguments: --teir 64; did you mean --tier?\n",
        ),
        (["status", "--jsno=1"], "; did you mean --json?\n"),
        (["list", "--nothing-like-it"], "unrecognized arguments: --nothing-like-it\n"),
        *((["limit", "a", text], f"{text}: {NO_SIZE}") for text in ("64X", "2GiBi", "much")),
        *((["suspend", "a", "--timeout", text], f"{text}: {NO_TIME}") for text in ("0", "soon")),
        *(
            (["status", "--watch", f"--interval={text}"], f"{text}: {NO_TIME}")
            for text in ("inf", "nan", "0", "-3")
        ),
    ],
)
def test_what_a_subcommand_has_not_or_cannot_read(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize("variables", [(), ("KVPATCH_IDLE=30s",), ("env", "A=1")])
def test_verify_of_a_command_that_is_not_there_leaves_nothing(
    monkeypatch, capsys, tmp_path, variables
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["verify", "--", *variables, "vllm", "serve", "x"]) == 2
    assert "there is no command vllm on PATH" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--verdicts", "--logs"])
@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("/proc/x", "/proc/x: No such file or directory"),
        ("/etc/passwd", "/etc/passwd: File exists"),
        ("closed", "nothing can be written into closed; name another one"),
    ],
)
def test_verify_with_a_folder_that_cannot_be_used_starts_nothing(
    monkeypatch, capsys, tmp_path, option, folder, why
):
    """It was known after minutes of the device, by a traceback and the exit status of a fault."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, *_, **__: Path(path).name != "closed")
    assert cli.main(["verify", option, folder, "--", "true"]) == 2
    assert capsys.readouterr().out == f"kvpatch verify: {why} ({option})\n"


def test_verify_sets_the_variables_before_a_command(monkeypatch, tmp_path):
    seen = []

    def run(options, say):
        seen.append(options)
        return running.Result(Judgement(missing=["everything"]))

    monkeypatch.setattr(running, "run", run)
    monkeypatch.setattr("kvpatch.cli.verify.signal.signal", lambda *_: None)
    words = ["--verdicts", str(tmp_path / "a"), "--logs", str(tmp_path / "b"), "--", "A=1", "true"]
    assert cli.main(["verify", *words]) == 3
    assert (seen[0].command, seen[0].environment["A"]) == (("true",), "1")


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_a_subcommand_has_both_of_its_functions(command):
    module = importlib.import_module(command.module)
    assert callable(module.configure)
    assert callable(module.run)


@pytest.mark.parametrize(("set_to", "seen"), [(None, None), ("1", "1"), ("0", "0")])
def test_the_environment_is_the_operators(run, set_to, seen):
    """``import kvpatch`` sets the switch for children; the command must not mean that."""
    code = "from kvpatch import cli; print(cli.operator_environment().get('KVPATCH'))"
    done = run(sys.executable, "-c", code, **({} if set_to is None else {"KVPATCH": set_to}))
    assert done.out == f"{seen}\n"


def test_a_reader_that_stops_reading_is_no_error(run):
    done = run("bash", "-c", f"set -o pipefail; {sys.executable} -m kvpatch doctor | true")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_knows_every_command_and_option(capsys, shell):
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for words in ("doctor", "status", "matrix", "import", "watch", "rows"):  # fish has no dashes
        assert words in script


def test_completion_without_shtab_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == "shtab is not installed: pip install shtab\n"
