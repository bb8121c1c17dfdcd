"""The ``kvpatch`` command: a list of subcommands, each in a module of its own.

A subcommand's module has ``configure(parser)``, which adds its options, and
``run(arguments) -> int``, which returns the exit code. Only the module of the
requested subcommand is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kvpatch import bootstrap
from kvpatch.environ import SWITCH
from kvpatch.version import VERSION


class Command(NamedTuple):
    """One subcommand: its name, its module, and its line in the help."""

    name: str
    module: str
    help: str


COMMANDS: tuple[Command, ...] = (
    Command("doctor", "kvpatch.cli.doctor", "check this environment for kvpatch"),
    Command("status", "kvpatch.cli.status", "show the memory and transfers of running engines"),
    Command("verify", "kvpatch.cli.verify", "test a command on this machine, and let it start"),
    Command("size", "kvpatch.cli.size", "show what a model's KV cache takes, and the commands"),
    Command("pool", "kvpatch.cli.pool", "show the host pool, or set its limit"),
    Command("list", "kvpatch.cli.listing", "show the engines that can be suspended and limited"),
    Command("suspend", "kvpatch.cli.suspend", "store an engine's KV cache and free its memory"),
    Command("resume", "kvpatch.cli.resume", "give a suspended engine its memory back"),
    Command("limit", "kvpatch.cli.limit", "set the memory of the device that an engine may map"),
    Command("balance", "kvpatch.cli.balance", "move memory between the engines of a device"),
    Command("dashboard", "kvpatch.cli.dashboard", "print Grafana's dashboard, or alert rules"),
    Command("matrix", "kvpatch.cli.matrix", "show what is validated on each vLLM release"),
    Command("clean", "kvpatch.cli.clean", "list what engines left behind, or remove it"),
    Command("completion", "kvpatch.cli.completion", "print a completion script for a shell"),
)


def operator_environment() -> dict[str, str]:
    """Return the environment without what importing kvpatch set for child processes."""
    environment = dict(os.environ)
    if bootstrap.switched_on_by_import:
        environment.pop(SWITCH.name, None)
    return environment


class Parser(argparse.ArgumentParser):
    """A parser whose subcommands say themselves, with a near one, which option they do not know."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Return the options; what is left over is an error of the subcommand that has it."""
        options, rest = super().parse_known_args(*args, **kwargs)
        if rest:
            from difflib import get_close_matches  # here, because a verb's start is its time

            word = rest[0].partition("=")[0]
            near = get_close_matches(word, self._option_string_actions, n=1, cutoff=0.7)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return options, rest


def parser(configured: Collection[Command]) -> argparse.ArgumentParser:
    """Return the parser of the command line; only the modules of ``configured`` are imported."""
    parser = Parser(
        prog="kvpatch", description="vLLM's KV offloading on kvcached's elastic KV memory."
    )
    parser.add_argument("--version", action="version", version=f"kvpatch {VERSION}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if command in configured:
            importlib.import_module(command.module).configure(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser(()).print_help(sys.stderr)
        return 2
    wanted = [command for command in COMMANDS if command.name in words[:1]]
    options = parser(wanted).parse_args(words)
    (chosen,) = (command for command in COMMANDS if command.name == options.command)
    try:
        code: int = importlib.import_module(chosen.module).run(options)
    except BrokenPipeError:  # the reader, for example head, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return code
