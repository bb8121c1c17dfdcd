"""``scripts/bench sharing``: eight served models, few busy, on a device for three.

The setting of the simulation whose results are in docs/results/sharing.json, at a scale that eight
engines on the host device fit into: the same share of the device for a tier and for the longest
request, users whose conversations grow and return, and spells in which one or two models are busy.
In each arm the same prompts are asked in the same order:

static parts                    vLLM's own offloading, an eighth of the device each, for good
kvpatch balance                 one device for all, an eighth as the first limit, beside the command

First come, first served is no arm: kvcached's 16,000 tokens that an idle engine keeps are a part of
some hundredths of a real device, and nearly half of this one, so that a busy engine waits for ever.
What counts are tokens that had to be computed, and processor time of all processes; seconds are of
this machine.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from harness import console
from harness.bench import arms, reports
from harness.bench.measure import read
from harness.bench.options import RESULTS
from harness.bench.sizes import BLOCK_BYTES, BLOCK_TOKENS, KV_HEADS, LAYERS, PAGE_BLOCKS, SMOKE
from harness.bench.starting import Starter
from harness.console import HarnessError, Screen
from harness.engines.balance_alone import command_for
from harness.model_cache import kept_model
from harness.serve import MODEL_NAME, SPARE_PAGES, Kind, Server, workspace
from kvpatch.environ import FIRST_LIMIT

MODELS, BUSY = 8, 1.5  # of them on average
LONGEST = 64  # blocks of a prompt
TURN = 4  # blocks that a conversation grows by
# 18 of the longest requests, as in the simulation, without what eight idle engines keep: the page
# of block 0, which is never given back, and kvcached's spare pages.
DEVICE = 18 * LONGEST
TIER = DEVICE * 2 // 5
KEPT = MODELS * (1 + int(SPARE_PAGES["KVCACHED_MAX_RESERVED_PAGES"])) * PAGE_BLOCKS
USERS, ASKING = 24, 12  # of a model, and of these in each of its turns
SPELLS, TURNS = 8, 5  # of the whole load, and turns of a busy model in each of them
ANSWER = 24  # tokens
EVERY = "0.2s"  # between two looks of the command: a spell is seconds here, not minutes
SIZE = replace(SMOKE, tier_blocks=TIER, together=4, peak=ASKING)
Result = dict[str, Any]
Asked = dict[int, list[list[int]]]  # prompts by the number of the model


def load(seed: int) -> list[Asked]:
    """Return what is asked at once, in order; the same for every arm."""
    drawn = random.Random(seed)
    # A conversation is its tokens; what an answer adds is drawn like the rest.
    users = [[_tokens(drawn, LONGEST // 2) for _ in range(USERS)] for _ in range(MODELS)]
    found = []
    # Each model has its turn before one has another.
    turns = (model for _ in count() for model in drawn.sample(range(MODELS), MODELS))
    for spell in range(SPELLS):
        busy = set(islice(turns, 1 + spell % 2))  # BUSY on average
        for _ in range(TURNS):
            prompts: Asked = {}
            for model in busy:
                for user in drawn.sample(range(USERS), ASKING):
                    history = users[model][user]
                    prompts.setdefault(model, []).append(list(history))
                    history += _tokens(drawn, TURN)
                    if len(history) > LONGEST * BLOCK_TOKENS:
                        users[model][user] = _tokens(drawn, LONGEST // 2)
            found.append(prompts)
    return found


def _tokens(drawn: random.Random, blocks: int) -> list[int]:
    return [drawn.randrange(10, 300) for _ in range(blocks * BLOCK_TOKENS)]


def ask(servers: Sequence[Server], asked: Sequence[Asked], pool: ThreadPoolExecutor) -> Result:
    """Ask everything, and return what it took."""
    before, worked = [read(one) for one in servers], processor(servers)
    waited = [_first(one) for one in servers]
    begun = time.monotonic()
    for turn in asked:
        list(
            pool.map(
                _complete,
                [servers[model] for model, prompts in turn.items() for _ in prompts],
                [prompt for prompts in turn.values() for prompt in prompts],
            )
        )
    seconds = time.monotonic() - begun
    after = [read(one) for one in servers]
    firsts = [
        (count - counted, total - known)
        for (counted, known), (count, total) in zip(waited, map(_first, servers), strict=True)
    ]
    return {
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor(servers) - worked, 1),
        "prompt_tokens": {
            name: int(sum(now[name] - then[name] for now, then in zip(after, before, strict=True)))
            for name in after[0]
        },
        "first_token_ms": round(1e3 * sum(b for _, b in firsts) / sum(a for a, _ in firsts), 1),
        "preemptions": int(sum(one.metric("vllm:num_preemptions_total") for one in servers)),
    }


def _complete(server: Server, prompt: list[int]) -> None:
    answer = server.client.post(
        "/v1/completions",
        json={
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
        },
        timeout=600,
    )
    answer.raise_for_status()


def _first(server: Server) -> tuple[float, float]:
    """Return of how many requests a server has the time to the first token, and its sum."""
    metrics, name = server.metrics(), "vllm:time_to_first_token_seconds"
    return metrics.total(f"{name}_count"), metrics.total(f"{name}_sum")


def processor(servers: Sequence[Server]) -> float:
    """Return the processor time of servers so far, with all their processes."""
    each = [process.cpu_times() for one in servers for process in one.processes()]
    return float(sum(times.user + times.system for times in each))


@contextmanager
def balanced(engines: Iterable[str], log: Path) -> Iterator[None]:
    """Run ``kvpatch balance`` for engines meanwhile.

    Raises:
        HarnessError: it ended before.
    """
    with command_for(engines) as command, log.open("wb") as file:
        words = [*command, "--every", EVERY]
        running = subprocess.Popen(words, stdout=file, stderr=file)
        try:
            with suppress(subprocess.TimeoutExpired):
                running.wait(timeout=5)  # options that it does not take end it at once
            if running.poll() is None:
                yield
            if running.poll() is not None:
                raise HarnessError(f"kvpatch balance ended: {log.read_text()[-300:]}")
        finally:
            running.send_signal(signal.SIGINT)
            running.wait()


def kinds(arm: arms.Arm) -> list[Kind]:
    """Return eight servers of an arm, each with its part of a device or all with one."""
    blocks = DEVICE + KEPT if arm.elastic else (DEVICE + KEPT) // MODELS
    # Room for the page that an unmapped address shows, one in each layer and engine.
    size = (DEVICE + KEPT) * BLOCK_BYTES + MODELS * LAYERS * (2 << 20)
    environment = {"KVPATCH_HOST_DEVICE": str(size), "KVCACHED_GPU_UTILIZATION": "1.0"}
    if arm.elastic:
        environment[FIRST_LIMIT.name] = str(blocks // MODELS * BLOCK_BYTES)
    names = [f"eight{arm.elastic:d}{number}" for number in range(MODELS)]
    longest = {"max-model-len": str((LONGEST + 2) * BLOCK_TOKENS)}
    found = [arms.kind(arm, SIZE, blocks, name, environment) for name in names]
    return [replace(one, arguments=one.arguments | longest) for one in found]


def measured(screen: Screen, seed: int = 1) -> Result:
    """Run every arm; return what each took."""
    asked, found = load(seed), {}
    with workspace() as folder, ThreadPoolExecutor(2 * ASKING) as pool:
        starter = Starter({"a": kept_model(7, screen.say, KV_HEADS)}, folder, SIZE, screen)
        for arm, name in ((arms.STATIC, "static parts"), (arms.KVPATCH, "kvpatch balance")):
            with ExitStack() as stack:
                every = kinds(arm)
                servers = [starter.start(stack, kind, device="eight") for kind in every]
                if arm.elastic:
                    names = [kind.engine for kind in every]
                    stack.enter_context(balanced(names, folder / "balance.log"))
                found[name] = ask(servers, asked, pool)
            screen.say(f"{name}: {found[name]}")
    return {
        "setting": {
            "models": MODELS,
            "busy": BUSY,
            "device_blocks": DEVICE,
            "kept_blocks": KEPT,
            "tier_blocks": TIER,
            "longest_blocks": LONGEST,
            "users": USERS,
            "requests": sum(len(prompts) for turn in asked for prompts in turn.values()),
        },
        "arms": found,
    }


def main(arguments: list[str]) -> int:
    """Measure, and write the result file, whose other parts are kept."""
    parser = console.parser("scripts/bench sharing", __doc__ or "")
    parser.add_argument("--output", type=Path, default=RESULTS / "sharing.json", metavar="FILE")
    output = parser.parse_args(arguments).output
    screen = console.Screen("eight engines")
    parts = {"engines": lambda: measured(screen)}
    reports.measure("scripts/bench sharing", parts, None, output)
    return 0
