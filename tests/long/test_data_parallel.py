"""``vllm serve --data-parallel-size 2``: two engines of one server, each with its own memory."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness import releases
from harness.engines.runs import Run, block_bytes, engine_arguments, prompts
from harness.engines.serving import Forked, eventually
from harness.serve import Server
from kvpatch import admitted, control

pytestmark = pytest.mark.skipif(
    releases.newest_built() not in admitted.table().get("2 engines", {}),
    reason="its cells have not run",
)

RANKS, EACH = 2, 16  # prompts of each engine, more than its device keeps
BLOCKS = 280  # of which the half is enough for the longest request
NAME = f"parallel-{os.getpid()}"
OURS = Run(
    engines=RANKS,
    blocks=BLOCKS,
    environment=(("KVCACHED_IPC_NAME", NAME), ("KVPATCH_FIRST_LIMIT", "75%")),
)
PLAIN = Run(kvpatch=False, offload=False, engines=RANKS, blocks=BLOCKS)


def of_rank(rank: int) -> list[Any]:
    """The prompts that are an engine's own."""
    return prompts(RANKS * EACH)[rank::RANKS]


def complete(server: Server, rank: int, prompt: dict[str, Any]) -> dict[str, Any]:
    """Let one engine answer a prompt; return its tokens, and how many were not computed."""
    answer = server.client.post(
        "/v1/completions",
        headers={"X-data-parallel-rank": str(rank)},
        json={
            "prompt": prompt["tokens"],
            "max_tokens": prompt["max_tokens"],
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    answer.raise_for_status()
    said = answer.json()
    details = said["usage"]["prompt_tokens_details"] or {}
    return {"tokens": said["choices"][0]["token_ids"], "cached": details.get("cached_tokens") or 0}


def ask(server: Server) -> list[list[dict[str, Any]]]:
    """Ask each engine its prompts, one at a time; return the answers by rank."""
    return [[complete(server, rank, prompt) for prompt in of_rank(rank)] for rank in range(RANKS)]


def tokens(answers: list[list[dict[str, Any]]]) -> list[list[Any]]:
    return [[one["tokens"] for one in each] for each in answers]


@dataclass
class Served:
    """A server of two engines, which were asked the same twice.

    Attributes:
        server: it.
        rounds: its answers, by round and rank.
    """

    server: Server
    rounds: list[list[list[dict[str, Any]]]]

    def engines(self) -> list[dict[str, Any]]:
        """What each engine publishes, in the order of their ranks."""
        processes = json.loads(self.server.kvpatch("status", "--json").stdout)["processes"]
        found = [process["engine"] for process in processes if "engine" in process]
        return sorted(found, key=lambda engine: int(engine["index"]))


def arguments(run: Run) -> dict[str, Any]:
    return engine_arguments(run) | {"enable_prompt_tokens_details": True}


@pytest.fixture(scope="module")
def plain(models, device, tmp_path_factory):
    """The tokens of plain vLLM with the same two engines."""
    folder = tmp_path_factory.mktemp("plain")
    with Forked(models("llama"), arguments(PLAIN), device.environ(PLAIN), folder) as server:
        return tokens(ask(server))


@pytest.fixture(scope="module")
def served(models, device, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    with Forked(models("llama"), arguments(OURS), device.environ(OURS), folder) as server:
        yield Served(server, [ask(server), ask(server)])


def test_each_engine_answers_as_plain_vllms_does_and_restores_from_its_own_tier(served, plain):
    first, again = served.rounds
    assert tokens(first) == tokens(again) == plain
    assert [[one["cached"] for one in each] for each in first] == [[0] * EACH] * RANKS
    assert [[one["cached"] for one in each] for each in again] == [[640] * EACH] * RANKS
    moved = EACH * 640 // 32 * block_bytes(OURS)
    assert eventually(
        lambda: all(
            engine["bytes"]["loaded"] >= moved <= engine["bytes"]["stored"]
            for engine in served.engines()
        )
    ), served.engines()
    assert all(engine["elastic"] for engine in served.engines())


def test_what_one_engine_stored_is_in_no_other_ones_tier(served, plain):
    for rank in range(RANKS):
        other = (rank + 1) % RANKS
        answer = complete(served.server, rank, of_rank(other)[0])
        assert answer == {"tokens": plain[other][0], "cached": 0}


def test_each_engine_has_a_line_a_name_and_a_socket(served):
    names = [f"{NAME}-dp{rank}" for rank in range(RANKS)]
    assert [engine["pool"] for engine in served.engines()] == names
    for verb in ("status", "list"):
        lines = served.server.kvpatch(verb).stdout.splitlines()
        assert [sum(name in line for line in lines) for name in names] == [1, 1], lines
    assert [control.find(name).name for name in names] == names
    with pytest.raises(control.Refused, match=", ".join(names)):
        control.find(NAME)
    assert not (Path("/dev/shm") / NAME).exists()
    assert all((Path("/dev/shm") / name).exists() for name in names)


def test_a_lower_limit_takes_pages_of_one_engine_alone(served, plain):
    first, second = (control.find(f"{NAME}-dp{rank}") for rank in range(RANKS))
    most = first.said["most"]
    for engine in (first, second):
        assert control.find(engine.name).said["limit"] == most * 3 // 4  # since it started
        assert control.find(engine.name).said["mapped"] > most // 2
        answer = engine.limit(most // 2)
        assert answer.mapped <= answer.limit <= most // 2
        if engine is first:  # the other one has what it had
            assert control.find(second.name).said["mapped"] > most // 2
    # Both give pages back and take what they need, and answer the same.
    assert tokens(ask(served.server)) == plain
    for engine in (first, second):
        assert control.find(engine.name).said["mapped"] <= most // 2
        engine.limit(most)
    assert eventually(
        lambda: all((one["fence"] or {}).get("holding") == 0 for one in served.engines())
    )
