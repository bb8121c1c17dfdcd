"""``kvpatch verify -- COMMAND``: the test of one command on this machine, and its verdict."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from kvpatch import cli, distributions, masking, verdicts
from kvpatch.doctor.command import split
from kvpatch.environ import VERDICTS
from kvpatch.verify import report
from kvpatch.verify import run as running

CODES = {"right": 0, "wrong": 1, "unfinished": 3}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "kvpatch verify [options] -- vllm serve MODEL ..."
    parser.add_argument(
        "--no-plain",
        dest="plain",
        action="store_false",
        help="do not compare answers with the same command without kvpatch",
    )
    parser.add_argument(
        "--verdicts",
        type=Path,
        metavar="DIR",
        help="folder for the verdict, which holds while "
        f"{VERDICTS} names this folder (default: the user's own)",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="folder for the logs (default: a temporary one)"
    )
    parser.add_argument(
        "--start-seconds",
        type=float,
        default=1800.0,
        metavar="S",
        help="that the command may take until it answers (default: 1800)",
    )
    words = parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    words.help = "as it would be started"
    parser.epilog = (
        "After -- may be variables and a command. It is started with kvpatch on and refusals of "
        "what is not validated lifted, on a free port of 127.0.0.1, and needs the device to "
        "itself. Exit status: 0 right, 1 wrong, 2 bad options, 3 not everything was seen."
    )


def run(options: argparse.Namespace) -> int:
    """Run the test and write its verdict; return the exit code."""
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begun:5.0f}s] {line}", flush=True)

    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    settings, command = split(words)
    if not command:
        return bad("no command was given; put it after --")
    environment = cli.operator_environment() | settings
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        return bad(f"there is no command {command[0]} on PATH; activate its environment")
    option = "--verdicts"
    try:
        where = options.verdicts or verdicts.own_folder()
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_writable(where)
        option = "--logs"
        folder = options.logs or Path(tempfile.mkdtemp(prefix="kvpatch-verify-"))
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            return bad(f"{folder} is not empty")
        check_writable(folder)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return bad(f"{name}{error.strerror or error} ({option})")
    say(shlex.join(masking.command(words)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and not without ending the command
    for probe in distributions.probes():
        if probe.needed():
            say("first what kvpatch needs to know of the device")
            if probe.run(environment, options.verdicts):
                print("kvpatch verify: not started: the probe was not right")
                return CODES["unfinished"]
    chosen = running.Options(
        command=tuple(command),
        environment=environment,
        folder=folder.absolute(),
        plain=options.plain,
        start_seconds=options.start_seconds,
    )
    result = running.run(chosen, say)
    print(report.text(result), flush=True)
    word = result.judgement.word
    if result.combination and word != "unfinished":
        content = report.content(result, words, time.strftime("%Y-%m-%d"), options.plain)
        print(f"verdict: {verdicts.write(where, content)}")
    print(f"logs: {folder}")
    return CODES[word]


def check_writable(folder: Path) -> None:
    """Raise OSError if nothing can be written into a folder: after the run it would be lost."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"nothing can be written into {folder}; name another one")


def bad(why: str) -> int:
    """Say why a command cannot be verified; return the exit code of bad options."""
    print(f"kvpatch verify: {why}")
    return 2
