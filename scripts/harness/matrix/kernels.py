"""Whether a release gives the same tokens on the compiled libraries of another one.

    python -m harness.matrix.kernels 0.33.0 0.32.0

Plain vLLM of both releases answers the same prompts, on each model runner. Exit status 1 when a
token differs: the Python of the first does not fit the libraries of the second, or vLLM computes
something else, and a person has to look.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.engines.runs import Run
from harness.matrix.cells import Engines, Trial

RUNNERS = ("v1", "v2")


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[int, int]:
    """Return how many answers of two runs have the same tokens, and how many there are."""
    if "failed" in mine or "failed" in theirs:
        return 0, 1
    pairs = list(zip(mine["rounds"][0], theirs["rounds"][0], strict=True))
    return sum(one["tokens"] == other["tokens"] for one, other in pairs), len(pairs)


def main() -> int:
    """Run the command line."""
    version, kernels = sys.argv[1:]
    different = 0
    with tempfile.TemporaryDirectory(prefix="kvpatch-kernels-") as folder:
        for runner in RUNNERS:
            found = []
            for one in (version, kernels):
                wanted = Run(vllm=one, runner=runner, kvpatch=False, offload=False)
                engines = Engines(one, Path(folder) / one, print)
                found.append(engines.run(wanted, Trial({}), f"plain-{runner}"))
            right, answers = same(*found)
            print(f"{runner}: {right} of {answers} answers have the same tokens")
            different += right != answers
    return int(different > 0)


if __name__ == "__main__":
    raise SystemExit(main())
