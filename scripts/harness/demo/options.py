"""Options of the demo. Standard library only: --help runs before any set-up."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from harness import console

DESCRIPTION = """\
Hold the same conversations with plain vLLM and with vLLM on kvcached's elastic KV
memory (kvpatch, OffloadingConnector), on this machine's CPU, and compare every token.
The conversations outgrow the KV cache and return, so that their blocks must come
back from the CPU tier. Takes about three minutes once .venv is set up."""

EPILOG = """\
Exit status: 0 when every token is equal, prompt tokens were served from the CPU tier
and the KV cache was on elastic memory; 1 when not, or when a server failed; 2 for bad
options; 128 and the signal's number when interrupted. Nothing is left running."""


@dataclass(frozen=True)
class Load:
    """The size of the load: every conversation has ``turns`` turns of user and model."""

    conversations: int
    turns: int
    shortest: int
    longest: int
    answer_tokens: int


FULL = Load(conversations=8, turns=3, shortest=2500, longest=6500, answer_tokens=32)
QUICK = Load(conversations=4, turns=2, shortest=4500, longest=6000, answer_tokens=16)

# The newest release that is supported and has a CPU build: the one in .venv.
NEWEST = "0.32.0"


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    vllm: str
    report: Path
    keep_logs: Path | None
    port: int | None
    load: Load
    command: str


def parse(arguments: list[str]) -> Options:
    """Parse the command line; exits with status 2 and one sentence on bad options."""
    parser = console.parser("scripts/demo", DESCRIPTION, EPILOG)
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("demo-report"),
        metavar="DIR",
        help="folder of the HTML report (default: ./demo-report)",
    )
    parser.add_argument(
        "--keep-logs",
        type=Path,
        metavar="DIR",
        help="keep the servers' logs in this folder (default: deleted)",
    )
    parser.add_argument(
        "--port",
        type=int,
        help="port on 127.0.0.1 for plain vLLM; the other takes the next (default: free ones)",
    )
    parser.add_argument(
        "--vllm",
        default=NEWEST,
        metavar="RELEASE",
        help=f"release of vLLM, installed into .venvs when it is not there (default: {NEWEST})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter conversations, about a minute"
    )
    chosen = parser.parse_args(arguments)
    if chosen.port is not None:
        problem = _port_problem(chosen.port) or _port_problem(chosen.port + 1)
        if problem:
            parser.error(problem)
    console.make_folders(parser, chosen.report, chosen.keep_logs)
    if not re.fullmatch(r"\d+\.\d+\.\d+", chosen.vllm):
        parser.error(f"{chosen.vllm} is no release of vLLM; one is {NEWEST}")
    return Options(
        vllm=chosen.vllm,
        report=chosen.report,
        keep_logs=chosen.keep_logs,
        port=chosen.port,
        load=QUICK if chosen.quick else FULL,
        command=" ".join(["scripts/demo", *arguments]),
    )


def _port_problem(port: int) -> str | None:
    if not 1024 <= port <= 65535:
        return f"port {port} is not between 1024 and 65535"
    with socket.socket() as probe:
        # As the server binds: a port whose last connection is still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return f"port {port} cannot be used ({error.strerror}); choose another or leave it out"
    return None
