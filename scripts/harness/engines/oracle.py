"""Whether an engine did what plain vLLM does: tokens and log-probabilities of the same prompts."""

from collections.abc import Callable
from typing import Any

from harness.engines.runs import Finished, Run

Engine = Callable[[Run], Finished]
PLAIN = Run(kvpatch=False, offload=False)
SMALL_TIER = 100  # blocks; the 12 prompts fill 240


def same_tokens(ours: list[Any], theirs: list[Any]) -> int:
    """How many prompts were answered with the same tokens."""
    return sum(one["tokens"] == other["tokens"] for one, other in zip(ours, theirs, strict=True))


def widest_gap(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference between two log-probabilities of a token."""
    gaps: list[float] = [
        abs(a - b)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    ]
    return max(gaps)


def assert_same(ours: Finished, plain: Finished) -> None:
    """Both rounds have the tokens and the log-probabilities of plain vLLM."""
    for index in range(2):
        assert same_tokens(ours.round(index), plain.round(index)) == len(plain.round(index)) > 0
        assert widest_gap(ours.round(index), plain.round(index)) < 1e-4


def assert_same_round(ours: list[Any], theirs: list[Any]) -> None:
    """The first prompts of a round have the tokens and the log-probabilities of plain vLLM."""
    theirs = theirs[: len(ours)]
    assert [one["tokens"] for one in ours] == [other["tokens"] for other in theirs]
    assert widest_gap(ours, theirs) < 1e-4


def cached(records: list[Any]) -> int:
    """The tokens of a round that were not computed."""
    return sum(record["cached"] for record in records)
