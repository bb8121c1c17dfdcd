"""scripts/gpu: the first minutes on a machine with an NVIDIA GPU, which may have no network.

scripts/gpu bundle                 what the machine lacks, in parts that can be carried: .kit/1 ...
                                   (by .venv/bin/python, after scripts/setup)
scripts/gpu unpack .kit/1 ...      on the machine: an environment of each release in the parts
scripts/gpu run                    on the machine: the steps, in order of worth
scripts/gpu run --host             what of them runs without a GPU, on the host device
"""

import argparse
import sys
import time
from pathlib import Path

from harness import console
from harness.gpu import KIT, PARTS, parts, run, unpack


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = console.parser("scripts/gpu", __doc__ or "")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="bundle|unpack|run")
    bundle = verbs.add_parser("bundle", help="make the parts, here, with a network")
    bundle.add_argument(
        "--work", type=Path, default=PARTS, metavar="DIR", help="for the parts (default: .kit)"
    )
    bundle.add_argument(
        "--size", type=float, default=55, metavar="MB", help="of a part at most (default: 55)"
    )
    bundle.add_argument(
        "--cuda",
        type=Path,
        default=Path("/usr/local/cuda"),
        metavar="DIR",
        help="with CUDA's headers (default: /usr/local/cuda)",
    )
    opened = verbs.add_parser("unpack", help="make environments of parts, on the machine")
    opened.add_argument("parts", type=Path, nargs="+", metavar="PART", help="a folder of bundle's")
    opened.add_argument(
        "--kit", type=Path, default=KIT, metavar="DIR", help=f"for environments (default: {KIT})"
    )
    ran = verbs.add_parser("run", help="run the steps, on the machine")
    ran.add_argument("--host", action="store_true", help="on the host device, without a GPU")
    ran.add_argument("--steps", default="", metavar="A,B", help="these only (default: all)")
    ran.add_argument("--list", action="store_true", help="list the steps, and run none")
    ran.add_argument(
        "--kit", type=Path, default=KIT, metavar="DIR", help=f"unpack's folder (default: {KIT})"
    )
    ran.add_argument(
        "--python",
        type=Path,
        action="append",
        metavar="PATH",
        help="of an environment with vLLM, kvcached and kvpatch; the second and later ones are "
        "verified only (default: those of the kit, or else the one that runs this)",
    )
    ran.add_argument("--model", default="", help="(default: ones with random weights)")
    ran.add_argument(
        "--tier-gib", type=float, default=4, metavar="GIB", help="of a CPU tier (default: 4)"
    )
    ran.add_argument(
        "--seconds", type=float, default=0, metavar="S", help="of a step at most (default: its own)"
    )
    ran.add_argument("--output", type=Path, default=Path("gpu-results"), metavar="DIR")
    ran.add_argument("words", nargs="*", metavar="-- OPTION", help="for every vllm serve")
    ran.epilog = (
        "Exit status: 0 all right, 1 something was wrong, 2 bad options, 3 not everything was seen."
    )
    opened.epilog = f"Exit status: 0 right, {unpack.DAMAGED} something is damaged, 1 anything else."
    return made


def main() -> int:
    """Run the command line; return the exit status."""
    options = parser().parse_args()
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begun:4.0f}s] {line}", flush=True)

    try:
        if options.verb == "bundle":
            try:
                from harness.gpu import bundle
            except ModuleNotFoundError as missing:
                raise console.HarnessError(
                    f"{missing}: after scripts/setup, type .venv/bin/python scripts/gpu bundle"
                ) from missing
            return bundle.main(options, say)
        if options.verb == "run":
            console.interrupts.install()
            return run.main(options, say)
        return unpack.main(options.parts, options.kit.absolute(), say)
    except (console.HarnessError, OSError) as error:
        print(f"scripts/gpu {options.verb}: {error}", file=sys.stderr)
        return unpack.DAMAGED if isinstance(error, parts.Damaged) else 1
    except console.Interrupted as interrupted:
        print(f"scripts/gpu {options.verb}: interrupted by {interrupted}", file=sys.stderr)
        return 128 + interrupted.signum
