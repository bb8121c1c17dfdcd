"""``vllm serve`` on the emulated device, as a reader types it: "served" in docs/results/cuda.json.

    python -m harness.cuda.served [RELEASE...] [--seeds 10] [--engines NAME...]

``scripts/cuda serve`` answers prompts over HTTP, and again after a reset of the prefix cache, from
the tier; the same command with ``--plain`` says what is right. It does so in rounds, of other
prompts each: one without delays, and one for each kind of delay and each seed.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import psutil

from harness import ROOT, connectors, console, provenance, releases
from harness.cuda import campaign, device, emulated, environment
from harness.engines import plugins
from harness.engines.runs import model_of
from harness.processes import SCRIPTS
from kvpatch.verify.child import free_port

LIMIT = 400  # seconds of a start
AT_ONCE = 2  # servers
MODEL = "served"
PARALLEL, ENGINES = "Offloading, 2 engines", 2  # of one server, each on a device: data parallelism
# The model's own dtype is float32, and the profile run is over all sequences.
OPTIONS = ("--enforce-eager", "--dtype=bfloat16", "--max-num-seqs=4", "--max-model-len=2048")
# Lazy mode stores what is next to be evicted: on a device with little more than a request needs.
LITTLE = ("--max-model-len=1024", "--num-gpu-blocks-override=128")
LATE = ("--worker-extension-cls", "emu_device.Late")
GIB = 1 << 30
Round = tuple[str, int]  # a kind of delay, and a seed
# A token of an answer: itself, the next best and by how much that is less likely, logarithmically.
Token = tuple[int, int, float]
# Logits of bfloat16 have steps of 1/32 from 4 on. With all of a prompt in the tier its last token
# is computed alone, and has other last digits than in the whole prompt.
TIE = 1 / 16


def tiers(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the options of each connector, by its name; ``folder`` is for a tier's files."""
    offloading, eager = connectors.offloading(GIB), connectors.simple(GIB, lazy=False)
    disk = {"type": "fs", "root_dir": str(folder / "disk")}
    others = {
        "Simple eager": eager,
        "Simple lazy": connectors.simple(GIB, lazy=True),
        "tiering fs": connectors.tiering(GIB // 8, [disk]),
        "Multi": connectors.multi(offloading, eager),
    }
    found: dict[str, tuple[str, ...]] = {
        name: ("--kv-transfer-config", json.dumps(one)) for name, one in others.items()
    }
    found["Simple lazy"] += LITTLE
    offload = ("--kv-offloading-size", "1")
    return {"Offloading": offload, PARALLEL: (*offload, f"--data-parallel-size={ENGINES}"), **found}


def prompts(number: int) -> list[list[int]]:
    """Return the seeded prompts of a round, of 300 to 500 tokens."""
    source = random.Random(number)
    return [[source.randrange(3, 300) for _ in range(300 + 100 * index)] for index in range(3)]


def seconds_of(process: psutil.Process) -> float:
    """Return the seconds of processor that a process and its descendants have used."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used = one.cpu_times()
            total += used.user + used.system
    return total


def answers(client: httpx.Client, number: int, engines: int) -> list[tuple[list[Token], int]]:
    """Return a round's answers, and how many tokens of each prompt were not computed.

    Of each engine those of all prompts.
    """
    found = []
    for rank, prompt in product(range(engines), prompts(number)):
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        said = client.post(
            "/v1/completions",
            json=asked | {"return_tokens_as_token_ids": True, "logprobs": 2},
            headers={"X-data-parallel-rank": str(rank)} if engines > 1 else {},
        ).json()
        cached = (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        found.append((tokens_of(said["choices"][0]["logprobs"]), cached))
    return found


def tokens_of(said: dict[str, Any]) -> list[Token]:
    """Return an answer from its logprobs, whose tokens are called ``token_id:7``."""
    found = []
    for name, best in zip(said["tokens"], said["top_logprobs"], strict=True):
        other, less = max((item for item in best.items() if item[0] != name), key=lambda it: it[1])
        of_names = (int(one.partition(":")[2]) for one in (name, other))
        found.append((*of_names, best[name] - less))
    return found


def differs(mine: list[Token], right: list[Token]) -> str:
    """Return how an answer differs: "wrong answers", "ties" in what is next best, or not."""
    for (one, *_), (other, next_best, by) in zip(mine, right, strict=True):
        if one != other:
            return "ties" if one == next_best and abs(by) < TIE else "wrong answers"
    return ""


def reset(client: httpx.Client) -> None:
    """Empty the device's prefix cache, once the copies of its blocks have ended.

    Raises:
        AssertionError: they do not end.
    """
    given_up = time.monotonic() + 60
    while not client.post("/reset_prefix_cache").raise_for_status().json()["success"]:
        assert time.monotonic() < given_up, "the prefix cache is not reset"
        time.sleep(0.05)


def serve(
    version: str,
    *words: str,
    rounds: list[Round],
    options: tuple[str, ...] = (),
    engines: int = 1,
) -> dict[str, Any]:
    """Serve, and in each round answer, reset and answer again; return what came of it.

    Raises:
        AssertionError: the server did not start, or did not end by itself; the end of its log.
    """
    port = free_port()
    command = [str(ROOT / "scripts/cuda"), "--vllm", version, f"--devices={engines}", *options]
    command += ["serve"]
    command += [str(model_of("llama", 8)), "--served-model-name", MODEL, *OPTIONS, *LATE, *words]
    command += ["--port", str(port), "--enable-prompt-tokens-details"]
    settings = campaign.runner_of(version) | {"VLLM_SERVER_DEV_MODE": "1"}  # it has the reset
    found, restored = [], 0
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as log,
        httpx.Client(timeout=120) as client,
    ):
        if engines > 1:
            lifted = plugins.install(Path(folder), plugins.lift_data_parallel.__name__)
            settings |= {emulated.PLUGINS: os.pathsep.join([lifted, str(SCRIPTS)])}
        client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        begun = time.monotonic()
        process = subprocess.Popen(
            command,
            env=os.environ | campaign.PAGES | settings,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            ready = False
            while not ready and process.poll() is None and time.monotonic() - begun < LIMIT:
                time.sleep(0.2)
                with suppress(httpx.TransportError):
                    ready = client.get("/health").is_success
            log.seek(0)
            assert ready, log.read()[-2000:]
            start = time.monotonic() - begun
            prompt = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1}
            client.post("/v1/completions", json=prompt).raise_for_status()
            first, used = time.monotonic() - begun, seconds_of(psutil.Process(process.pid))
            for number, (kind, seed) in enumerate(rounds):
                late = {"method": "be_late", "args": [emulated.DELAYS.index(kind), seed]}
                client.post("/collective_rpc", json=late).raise_for_status()
                for again in (False, True):
                    given = answers(client, number, engines)
                    found += [tokens for tokens, _ in given]
                    restored += again * sum(cached for _, cached in given)
                    reset(client)
        finally:
            process.terminate()
            status = process.wait(60)
        log.seek(0)
        text = log.read()
        said = re.search("^the emulated device had ([0-9]+)", text, re.MULTILINE)
        assert said, text[-2000:]
    return {
        "answers": found,
        "rounds": len(rounds),
        "restored tokens": restored,
        "complaints": int(said[1]),
        "status": status,
        "ready seconds": round(start, 1),
        "first token seconds": round(first, 1),
        "first token processor seconds": round(used, 1),
    }


def engines_of(name: str) -> int:
    """Return how many engines the server of a name has."""
    return ENGINES if name == PARALLEL else 1


def of_each(expected: list[list[Token]], engines: int) -> list[list[Token]]:
    """Return the answers of one engine as those of several, which are asked one after another."""
    asked = [list(one) for one in zip(*[iter(expected)] * len(prompts(0)), strict=True)]
    return [tokens for one in asked for _ in range(engines) for tokens in one]


def bytes_of(version: str) -> int:
    """Return the size of a release's environment, without what is linked from another."""
    root = environment.FOLDER / version
    stats = {one.lstat().st_ino: one.lstat().st_size for one in root.rglob("*")}
    return sum(stats.values())


def lines() -> dict[str, int]:
    """Return the lines of the emulated device, by language."""
    here = Path(device.__file__).parent
    count = {
        "C++": [*here.glob("*.[ch]pp"), here / "work.h"],
        "Python": here.glob("*.py"),
    }
    return {
        name: sum(len(one.read_text().splitlines()) for one in files if one.stem != "conformance")
        for name, files in count.items()
    }


def main() -> int:
    """Serve each release and record it; 1 where one is not right."""
    parser = console.parser("python -m harness.cuda.served", __doc__ or "")
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="of vLLM")
    parser.add_argument("--seeds", type=int, default=10, help="of each kind of delay")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="by default all")
    asked = parser.parse_args()
    rounds = campaign.rounds_of(asked.seeds)
    wrong = False
    for version in asked.releases or [releases.newest_built()]:
        of_release = {
            "torch": environment.pinned(environment.site_of(version), "torch"),
            "environment bytes": bytes_of(version),
            "commit": provenance.commit(),
        }
        with (
            tempfile.TemporaryDirectory(prefix="kvpatch-cuda-") as folder,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            plain = pool.submit(serve, version, rounds=rounds, options=("--plain",))
            words = {
                name: tiers(Path(folder, name))[name] for name in asked.engines or tiers(Path())
            }
            served = {
                name: pool.submit(serve, version, *more, rounds=rounds, engines=engines_of(name))
                for name, more in words.items()
            }
            expected = plain.result()["answers"]
            for name, one in served.items():
                try:
                    row = one.result() | of_release
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    print(version, name, error, flush=True)
                    wrong = True  # and the other servers go on
                    continue
                right = of_each(expected, engines_of(name))
                found = Counter(map(differs, row.pop("answers"), right))
                row |= {name: found[name] for name in ("wrong answers", "ties")}
                print(version, name, json.dumps(row), flush=True)
                wrong |= bool(
                    row["wrong answers"] or row["complaints"] or not row["restored tokens"]
                )
                campaign.record({"served": {version: {name: row}}, "lines": lines()})
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
