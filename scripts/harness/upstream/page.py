"""docs/upstream.md, from docs/results/upstream.json."""

from collections.abc import Iterator

from harness import markdown
from harness.upstream import results
from harness.upstream.causes import CAUSES
from harness.upstream.suites import SUITES, Suite


def render() -> str:
    """Return the page."""
    found = results.read()["suites"]

    def counts(suite: Suite, mode: str) -> dict[str, int]:
        counted = found[suite.name][mode]
        passed, failed = counted.get("passed", 0), counted.get("failed", 0)
        skipped = counted.get("skipped", 0)
        return {"passed": passed, "ran": passed + failed, "skipped": skipped} | {
            "seconds": counted["seconds"]
        }

    def named(suite: Suite) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        for cause, tests in found[suite.name]["listed"].items():
            yield cause, by_file(tests)

    def listed(suite: Suite) -> int:
        return sum(map(len, found[suite.name]["listed"].values()))

    count = {
        cause.name: sum(len(one["listed"].get(cause.name, ())) for one in found.values())
        for cause in CAUSES
    }
    return markdown.render(
        "upstream.md",
        found=found,
        suites=[
            (one, counts(one, "without kvpatch"), counts(one, "with kvpatch"), listed(one))
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
    files: dict[str, dict[str, int]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        functions = files.setdefault(file, {})
        function = name.partition("[")[0]
        functions[function] = functions.get(function, 0) + 1
    return [
        (
            file.removeprefix("tests/v1/"),
            ", ".join(f"`{name}`" + (f" ({n})" if n > 1 else "") for name, n in functions.items()),
        )
        for file, functions in files.items()
    ]
