"""scripts/upstream: vLLM's and kvcached's own tests without kvpatch and with it.

    scripts/upstream           every suite; renews docs/results/upstream.json
    scripts/upstream core      one of them

scripts/test upstream compares with what is recorded. Both download the tests once.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness import console, provenance
from harness.upstream import compare, results, runner
from harness.upstream.suites import SUITES, Suite


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if a test differs without a cause."""
    summary, _, description = (__doc__ or "").partition("\n\n")
    options = console.parser(results.COMMAND, f"{summary}\n\n{description}")
    names = [suite.name for suite in SUITES]
    options.add_argument("suites", nargs="*", help=f"of {', '.join(names)}; all by default")
    chosen = options.parse_args(argv).suites
    if set(chosen) - set(names):
        options.error(f"the suites are {', '.join(names)}")
    screen = console.Screen(results.COMMAND)
    suites = [suite for suite in SUITES if not chosen or suite.name in chosen]
    return console.run(screen, lambda: _run(screen, suites))


def _run(screen: console.Screen, suites: Sequence[Suite]) -> int:
    failed = 0
    for suite in suites:
        head = provenance.header(f"{results.COMMAND} {suite.name}")  # before its own load
        with tempfile.TemporaryDirectory() as folder:
            off, on = (
                runner.run(suite, patched, Path(folder, str(patched))) for patched in (False, True)
            )
        seconds = f"{off.seconds:.0f} s and {on.seconds:.0f} s"
        causes, unknown = compare.caused(compare.differences(off.tests, on.tests))
        screen.say(f"{suite.name}: {len(off.tests)} tests, {seconds}, {len(causes)} with a cause")
        for line in unknown:
            screen.fail(line)
        failed += len(unknown)
        if not unknown:
            results.write(suite, head, results.of(off, on, causes))
    return int(failed > 0)
