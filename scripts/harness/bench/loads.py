"""The loads, as traces that ``vllm bench serve`` replays (its dataset ``timed_trace``).

A trace names a prompt by the hashes of its blocks, and prompts share what has the same
hashes in the same places. vLLM draws the tokens of a hash from its number, so that
numbers which no other repeat has are prompts which no other repeat has.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from harness.bench.sizes import BLOCK_TOKENS, Size

RATE = 2.0  # requests in a second
TURN_BLOCKS = 4  # the last answer, a block, and the user's next message


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        hashes: one for each block of the prompt.
        answer: tokens to generate.
    """

    hashes: tuple[int, ...]
    answer: int

    @property
    def tokens(self) -> int:
        """Tokens of the prompt: whole blocks."""
        return len(self.hashes) * BLOCK_TOKENS


@dataclass(frozen=True)
class Load:
    """Requests in the order they are sent.

    Attributes:
        together: in flight, if no ``rate`` is given.
        rate: requests that arrive in a second, at random, however many are in flight.
    """

    prompts: tuple[Prompt, ...]
    together: int
    rate: float = math.inf


def numbers(name: str, repeat: int) -> count[int]:
    """Return hashes that no other load and no other repeat has."""
    return count(random.Random(f"{name} {repeat}").randrange(1 << 40) << 20)


def _some(source: count[int], blocks: int) -> tuple[int, ...]:
    return tuple(next(source) for _ in range(blocks))


def no_reuse(size: Size, repeat: int) -> Load:
    """Prompts that share nothing: the overhead of offloading without hits."""
    source = numbers("no reuse", repeat)
    blocks = size.prompt // BLOCK_TOKENS
    prompts = tuple(Prompt(_some(source, blocks), size.answer) for _ in range(size.prompts))
    return Load(prompts, size.together)


def conversations(size: Size, repeat: int) -> Load:
    """Conversations that return when all others have had a turn.

    Together they are larger than the KV cache. What an answer adds to the history is drawn
    like the rest, so that every arm has the same history whatever it answered.
    """
    source = numbers("conversations", repeat)
    histories = [_some(source, size.prompt // BLOCK_TOKENS) for _ in range(size.conversations)]
    prompts = []
    for turn in range(size.turns):
        for number, history in enumerate(histories):
            if turn:
                histories[number] = history = history + _some(source, TURN_BLOCKS)
            prompts.append(Prompt(history, size.answer))
    return Load(tuple(prompts), size.together)


def long_answers(size: Size, repeat: int) -> Load:
    """Prompts that share nothing and arrive at a rate, with long answers: the time of a token.

    The shape by which vLLM's SimpleCPUOffloadConnector was measured (vllm#37160), smaller. All of
    them together are larger than the KV cache.
    """
    source = numbers("long answers", repeat)
    blocks = size.prompt // BLOCK_TOKENS // 4
    prompts = tuple(Prompt(_some(source, blocks), size.long_answer) for _ in range(size.asked))
    return Load(prompts, size.together, rate=RATE)


LOADS = {"no reuse": no_reuse, "conversations": conversations}
ANSWERS = {"long answers": long_answers}


def peak(size: Size, model: str, repeat: int, returning: bool = False) -> Load:
    """All prompts of one of two models at its peak, at once.

    Args:
        size: of the run.
        model: which; its prompts are its own.
        repeat: which.
        returning: the same prompts as at the peak, each with a question behind it.
    """
    source = numbers(f"peak of {model}", repeat)
    blocks = size.prompt // BLOCK_TOKENS
    prompts = [_some(source, blocks) for _ in range(size.peak)]
    if returning:
        prompts = [prompt + _some(source, 2) for prompt in prompts]
    return Load(tuple(Prompt(prompt, size.answer) for prompt in prompts), size.peak)


def write_trace(prompts: Sequence[Prompt], path: Path) -> Path:
    """Write prompts as a trace; all of them arrive at its start."""
    lines = [
        json.dumps(
            {
                "timestamp": 0,
                "input_length": prompt.tokens,
                "output_length": prompt.answer,
                "hash_ids": list(prompt.hashes),
            }
        )
        for prompt in prompts
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
