"""The conversations that the host pool is measured with."""

from __future__ import annotations

import json

import pytest

from harness.balancing.traces import Turn
from harness.bench import conversations
from harness.bench.conversations import TOKENS, prompts, read, renumbered, runs


@pytest.mark.parametrize("kind", ["coding", "chat"])
def test_a_prompt_has_the_tokens_of_its_blocks_and_one_more(kind):
    turns, words = read(kind), list(range(5000))
    made = list(prompts(turns, words, seed=1))
    assert [len(one["tokens"]) for one in made] == [len(keys) * TOKENS + 1 for _, keys in turns]
    assert made == list(prompts(turns, words, seed=1))
    assert made != list(prompts(turns, words, seed=2))
    blocks: dict[int, list[int]] = {}
    for (_, keys), prompt in zip(turns, made, strict=True):
        for at, key in enumerate(keys):
            part = prompt["tokens"][at * TOKENS : (at + 1) * TOKENS]
            assert blocks.setdefault(key, part) == part
    # Pieces of what is not a repetition differ.
    assert len({tuple(part) for part in blocks.values()}) > len(blocks) * 0.7


def test_a_coding_session_goes_on_with_what_was_said():
    """Else the loads have nothing to serve from a tier."""
    last: dict[int, list[int]] = {}
    shared = total = 0
    for session, keys in read("coding"):
        before = last.get(session, [])
        shared += sum(one == other for one, other in zip(before, keys, strict=False))
        total += len(keys)
        last[session] = keys
    assert shared / total > 0.8


def test_keys_are_scaled_and_renumbered_in_the_order_of_their_first_use():
    turns = [
        (0, Turn((9, 70, 8, 60), 2048, 1)),
        (1, Turn((5,), 512, 1)),
        (0, Turn((9, 70), 1024, 1)),
    ]
    assert renumbered(turns) == [(0, [[0, 2]]), (0, [[0, 1]])]
    assert runs([4, 5, 9]) == [[4, 2], [9, 1]]


def test_the_file_says_where_it_is_from_and_under_what_licence():
    found = json.loads(conversations.FILE.read_text())
    assert found["licence"].startswith("Apache-2.0")
    assert set(found["origin"]) == {"coding", "chat"}
