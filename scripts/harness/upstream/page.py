"""docs/upstream.md, from docs/results/upstream.json."""

from collections import Counter

from harness import markdown
from harness.upstream import results
from harness.upstream.causes import CAUSES
from harness.upstream.suites import SUITES


def counts(counted: dict[str, int]) -> dict[str, int]:
    """Return the counts of a run, with what ran."""
    every = {"passed": 0, "failed": 0, "skipped": 0} | counted
    return every | {"ran": every["passed"] + every["failed"]}


def render() -> str:
    """Return the page."""
    found = results.read()["suites"]
    count: Counter[str] = Counter()
    for one in found.values():
        count.update({cause: len(tests) for cause, tests in one["listed"].items()})
    return markdown.render(
        "upstream.md",
        found=found,
        suites=[
            (
                one,
                counts(found[one.name]["without kvpatch"]),
                counts(found[one.name]["with kvpatch"]),
                sum(map(len, found[one.name]["listed"].values())),
            )
            for one in SUITES
            if one.name in found
        ],
        open=[one for one in SUITES if one.name not in found],
        every=SUITES,
        causes=[(cause, count[cause.name]) for cause in CAUSES if count[cause.name]],
    )
