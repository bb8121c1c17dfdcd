"""Conversations of real services, scaled down for small models: ``conversations.json``.

    PYTHONPATH=scripts .venv/bin/python -m harness.bench.conversations CODING MOONCAKE

makes the file, from a folder of ``trace_*.json`` and from ``conversation_trace.jsonl``; where they
are from is in ``harness.balancing.traces``; of CODING here those files of at most 60,000 bytes.
Both are published under Apache-2.0. Of a prompt's blocks every second one of 512 tokens is taken,
and stands for one of 32: lengths are divided by 32, and what two prompts share is still shared.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.balancing import traces

FILE = Path(__file__).with_suffix(".json")
SCALE, TOKENS = 32, 32
EVERY = SCALE * TOKENS // traces.BLOCK
LONGEST = 60_000  # tokens of a prompt of the trace
SESSIONS, CHATS, PART = 20, 240, 0.1
STAGGER = 10.0  # seconds after which the next coding session starts
ANSWERING = 5.0  # seconds that an answer takes
ANSWER = 8  # tokens, of every answer

Turn = tuple[int, list[list[int]]]  # of which conversation; runs of blocks: the first, how many


def runs(keys: Iterable[int]) -> list[list[int]]:
    """Write keys as runs: the first of each, and how many follow one another.

    >>> runs([1, 2, 3, 7, 8])
    [[1, 3], [7, 2]]
    """
    found: list[list[int]] = []
    for key in keys:
        if found and sum(found[-1]) == key:
            found[-1][1] += 1
        else:
            found.append([key, 1])
    return found


def renumbered(turns: Iterable[tuple[int, traces.Turn]]) -> list[Turn]:
    """Scale turns down, with keys in the order in which they first appear."""
    names: dict[int, int] = {}
    found = []
    for conversation, turn in turns:
        keys = [names.setdefault(key, len(names)) for key in turn.keys[EVERY - 1 :: EVERY]]
        if keys:
            found.append((conversation, runs(keys)))
    return found


def in_time(sessions: Sequence[traces.Conversation]) -> list[tuple[int, traces.Turn]]:
    """Return the turns of sessions that start one after the other, in the order of time."""
    found = []
    for number, session in enumerate(sessions):
        now = number * STAGGER
        for turn in session:
            now += turn.pause
            found.append((now, number, turn))
            now += ANSWERING
    found.sort(key=lambda one: one[:2])
    return [(number, turn) for _, number, turn in found]


def make(coding: Path, mooncake: Path) -> dict[str, Any]:
    """Return what the file has."""
    sessions = traces.coding(coding, LONGEST, seed=0)[:SESSIONS]
    chats = traces.mooncake(mooncake, LONGEST, PART, seed=0)[:CHATS]
    return {
        "origin": {
            "coding": f"{traces.SOURCES['coding']}; here {SESSIONS} of at most 60,000 of both",
            "chat": f"{traces.SOURCES['chat']}: {CHATS} requests",
        },
        "licence": "Apache-2.0, of both",
        "scale": SCALE,
        "tokens_of_a_block": TOKENS,
        "coding": renumbered(in_time(sessions)),
        # A chat's first turn tells it from others no better than its blocks do.
        "chat": renumbered((0, turn) for _, turn in chats),
    }


def read(kind: str) -> list[tuple[int, list[int]]]:
    """Return the turns of a kind in the order of time: of which conversation, and their blocks."""
    found = json.loads(FILE.read_text())
    return [
        (conversation, [key for first, count in turn for key in range(first, first + count)])
        for conversation, turn in found[kind]
    ]


def prompts(
    turns: Iterable[tuple[int, list[int]]], words: Sequence[int], seed: int
) -> Iterator[dict[str, Any]]:
    """Write turns with tokens, as ``harness.engines.runs.prompts`` does.

    Args:
        turns: of ``read``.
        words: tokens; each block is a piece of them, from wherever its number says.
        seed: blocks of another one have other pieces.
    """
    for _, keys in turns:
        tokens: list[int] = []
        for key in keys:
            at = random.Random(f"{seed} {key}").randrange(len(words) - TOKENS)
            tokens += words[at : at + TOKENS]
        # What is asked for is not in a whole block.
        yield {"tokens": [*tokens, words[seed % len(words)]], "max_tokens": ANSWER}


def main() -> int:
    """Make the file."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench.conversations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("coding", type=Path, help="folder of trace_*.json")
    parser.add_argument("mooncake", type=Path, help="conversation_trace.jsonl")
    options = parser.parse_args()
    made = make(options.coding, options.mooncake)
    FILE.write_text(json.dumps(made, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
