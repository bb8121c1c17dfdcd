"""docs/upstream.md, from docs/results/upstream.json."""

from collections import Counter

from harness import markdown
from harness.upstream import results
from harness.upstream.causes import CAUSES
from harness.upstream.suites import SUITES, Suite


def render() -> str:
    """Return the page."""
    found = results.read()["suites"]

    def counts(counted: dict[str, int]) -> dict[str, int]:
        every = {"passed": 0, "failed": 0, "skipped": 0} | counted
        return every | {"ran": every["passed"] + every["failed"]}

    def named(suite: Suite) -> list[tuple[str, list[tuple[str, str]]]]:
        return [(cause, by_file(tests)) for cause, tests in found[suite.name]["listed"].items()]

    every = [one["listed"] for one in found.values()]
    count = {
        cause.name: sum(len(listed.get(cause.name, ())) for listed in every) for cause in CAUSES
    }
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
        named=named,
    )


def by_file(tests: list[str]) -> list[tuple[str, str]]:
    """Return the functions of each file, with the number of their parameters' sets."""
    files: dict[str, Counter[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        files.setdefault(file.removeprefix("tests/v1/"), Counter())[name.partition("[")[0]] += 1
    return [
        (file, ", ".join(f"`{name}`" + (f" ({n})" if n > 1 else "") for name, n in counts.items()))
        for file, counts in files.items()
    ]
