"""Options of the benchmark. Standard library only: --help runs before any set-up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from harness import ROOT, console
from harness.bench.sizes import FULL, SMOKE, Size

RESULTS = ROOT / "docs/results"
SCRATCH = ROOT / "bench-results"
# By their names in the result file.
PARTS = {"one": "one_model", "two": "two_models", "answers": "answers"}

DESCRIPTION = """\
Compare vLLM's ways to keep KV on the host device at equal memory budgets: throughput,
latency, hits, copies and memory of each. The arms of a repeat run one after the other, in
another order each time; two arms are identical, and their difference is the noise."""

EPILOG = """\
Other commands: scripts/bench steps, sharing and instructions; scripts/bench-startup measures
start-up by itself. The machine should be quiet: other load is in the noise. Exit status: 0 when
everything was measured, whatever the figures; 1 when something failed; 2 for bad options."""


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    kind: str
    size: Size
    output: Path
    parts: tuple[str, ...]
    arms: str
    logs: Path | None
    command: str


def parse(arguments: list[str]) -> Options:
    """Parse the command line; ends with status 2 and one sentence on bad options."""
    parser = console.parser("scripts/bench", DESCRIPTION, EPILOG)
    parser.add_argument("--smoke", action="store_true", help="one tiny repeat of everything")
    parser.add_argument("--repeats", type=int, help="of every arm and load (default: 5)")
    parser.add_argument(
        "--only",
        choices=PARTS,
        help="one: one model on a device; two: two models on one device; answers: "
        "long answers to prompts that arrive at a rate (default: all)",
    )
    parser.add_argument(
        "--arms", default="", metavar="TEXT", help="only arms whose name has this in it"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the result goes")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="keep the servers' logs")
    chosen = parser.parse_args(arguments)
    kind, size = ("smoke", SMOKE) if chosen.smoke else ("full", FULL)
    if chosen.repeats is not None:
        if not 1 <= chosen.repeats <= 100:
            parser.error(f"--repeats {chosen.repeats} is not between 1 and 100")
        size = replace(size, repeats=chosen.repeats, neighbour_repeats=chosen.repeats)
    # Only full runs of all arms are what docs/numbers.md shows.
    whole = kind == "full" and not chosen.arms
    output = chosen.output or (RESULTS / "host.json" if whole else SCRATCH / f"{kind}.json")
    console.make_folders(parser, output.parent, chosen.keep_logs)
    return Options(
        kind=kind,
        size=size,
        output=output,
        parts=(chosen.only,) if chosen.only else tuple(PARTS),
        arms=chosen.arms,
        logs=chosen.keep_logs,
        command=" ".join(["scripts/bench", *arguments]),
    )
