"""``kvpatch doctor``: the report as text or JSON, and the exit code."""

from __future__ import annotations

import argparse
import json

from kvpatch import cli, doctor
from kvpatch.doctor import Finding, Level
from kvpatch.telemetry.printable import printable
from kvpatch.version import VERSION

SCHEMA = 1  # of --json: fields may be added under it; one that is renamed or goes makes it 2
MARKS = {Level.OK: "ok", Level.NOTE: "note", Level.WARNING: "warn", Level.PROBLEM: "PROBLEM"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "kvpatch doctor [options] [-- vllm serve MODEL ...]"
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--import",
        dest="try_import",
        action=argparse.BooleanOptionalAction,
        help="import vllm with kvpatch on, in another process, which takes seconds "
        "(default: where no problem was found before)",
    )
    words = parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    words.help = "also whether this would start: options, configuration, memory and disks"
    parser.epilog = (
        "After -- may be variables and a command: kvpatch doctor -- KVPATCH_IDLE=30s vllm serve "
        "MODEL. vLLM reads it in another process, without an engine. Exit status 1 if a problem "
        "was found, 0 otherwise. Nothing is changed or deleted."
    )


def run(options: argparse.Namespace) -> int:
    """Print the report; return 1 if there is a problem."""
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    found = doctor.examine(cli.operator_environment(), options.try_import, words)
    problems = [finding for finding in found if finding.level is Level.PROBLEM]
    if options.json:
        report = {
            "schema": SCHEMA,
            "kvpatch": VERSION,
            "versions": doctor.versions(),
            "problems": len(problems),
            "warnings": sum(finding.level is Level.WARNING for finding in found),
            "findings": [finding.as_dict() for finding in found],
        }
        print(json.dumps(report, indent=2))
    else:
        print(text(found))
    return 1 if problems else 0


def text(found: list[Finding]) -> str:
    """Return the report: the findings, which may quote anybody's file names, and a summary line."""
    lines = []
    topics = list(dict.fromkeys(finding.topic for finding in found))
    for topic in topics:
        lines.append(topic)
        for finding in found:
            if finding.topic == topic:
                lines.append(f"  {MARKS[finding.level]:<8}{printable(finding.what)}")
                if finding.remedy:
                    lines.append(f"{'':10}-> {printable(finding.remedy)}")
    count = {level: sum(finding.level is level for finding in found) for level in Level}
    verdict = "no reason found why vLLM would not start with kvpatch on"
    if count[Level.PROBLEM]:
        verdict = "vLLM would fail to start correctly with kvpatch on"
    plural = {level: "" if count[level] == 1 else "s" for level in Level}
    lines.append(
        f"\n{count[Level.PROBLEM]} problem{plural[Level.PROBLEM]}, "
        f"{count[Level.WARNING]} warning{plural[Level.WARNING]}: {verdict}"
    )
    return "\n".join(lines)
