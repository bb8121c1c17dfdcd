"""What a GPU showed, for the documentation: from ``docs/results/gpu.json`` alone.

Without that file the same sections say that there is none.
"""

from collections.abc import Iterator
from typing import Any

from harness import markdown
from harness.gpu.seen import RIGHT, UNSEEN, WRONG
from harness.matrix import axes

Result = dict[str, Any]

# Of a verdict of ``kvpatch verify``; the matrix has other words for other devices.
VALIDATED, NOT_RUN = "validated (GPU)", "not run"
WORDS = {"right": VALIDATED, "wrong": "WRONG", "unfinished": UNSEEN}


def sections(gpu: Result | None) -> dict[str, dict[str, str]]:
    """Return the sections of each page, by their markers."""
    values = {"gpu": gpu, **(summary(gpu) if gpu else {})}
    front = {to: markdown.render("gpu-front.md", **values, to=to) for to in ("docs/", "")}
    own = {
        "gpu": markdown.render("gpu-begin.md", **values),
        "gpu-results": markdown.render("gpu-results.md", **values),
    }
    pages = {"README.md": {"gpu": front["docs/"]}, "docs/index.md": {"gpu": front[""]}}
    return pages | {"docs/on-a-gpu.md": own}


def summary(gpu: Result) -> Result:
    """Return what the templates ask of a result file."""
    steps = gpu["steps"]
    return {
        "device": gpu["machine"]["gpu"],
        "releases": list(dict.fromkeys(verdict_release(one) for one in gpu["verdicts"])),
        "steps": steps,
        "right": [row["step"] for row in steps if row["state"] == RIGHT],
        "wrong": [row["step"] for row in steps if row["state"] == WRONG],
        "unseen": [row["step"] for row in steps if row["state"] not in (RIGHT, WRONG)],
        "timings": list(timings(steps)),
        "tokens": list(first_tokens(steps)),
    }


def timings(steps: list[Result]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield what the driver's calls took: under which name, which call, and how long."""
    for row in steps:
        for name, fact in row.get("facts", {}).items():
            for call, took in fact.items() if isinstance(fact, dict) else ():
                if isinstance(took, dict) and took.keys() == {"p50", "p99", "max"}:
                    yield name, call, took


def first_tokens(steps: list[Result]) -> Iterator[tuple[str, float, float]]:
    """Yield each arm, and the milliseconds to first tokens of new and of returning prompts."""
    for row in steps:
        for name, fact in row.get("facts", {}).items():
            if isinstance(fact, dict) and fact.keys() == {"first", "returning"}:
                yield name, fact["first"]["p50_ms"], fact["returning"]["p50_ms"]


def on_gpus(gpu: Result | None) -> list[tuple[str, ...]]:
    """Return a line per release and device that ran: its name, and a verdict for each connector."""
    found: dict[str, dict[str, str]] = {}
    for one in (gpu or {"verdicts": ()})["verdicts"]:
        device = one["combination"]["device"].partition(" ")[2]
        line = found.setdefault(f"{verdict_release(one)} on one {device}", {})
        line[connector(one)] = WORDS[one["verdict"]]
    names = [one.name for one in axes.CONNECTORS]
    return [(name, *(line.get(each, NOT_RUN) for each in names)) for name, line in found.items()]


def verdict_release(verdict: Result) -> str:
    """Return the vLLM of a verdict."""
    return str(verdict["combination"]["versions"]["vllm"])


def connector(verdict: Result) -> str:
    """Return the connector of a verdict, by its name in the axes."""
    flags = verdict["combination"]["flags"]
    extra = flags.get("kv_transfer_config.kv_connector_extra_config", {})
    if flags.get("kv_transfer_config.kv_connector") == "SimpleCPUOffloadConnector":
        return "Simple lazy" if extra.get("lazy_offload") else "Simple eager"
    return "tiering fs" if extra.get("spec_name") == "TieringOffloadingSpec" else "Offloading"
