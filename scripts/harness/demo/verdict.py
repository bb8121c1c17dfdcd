"""The comparison of the ways, and whether the demo showed what it claims."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.demo.conversations import Answer


@dataclass
class Held:
    """The conversations, held one way.

    Attributes:
        answers: of both models.
        counted: the serving engine's own counters, by phase.
        used, kept: bytes that the first model has at its own peak, and at the second's.
        second_used: bytes that the second has at its peak.
        idle: bytes that both have when both are idle.
        cycle: what the picture is drawn from.
        elastic: whether both reported their KV caches on elastic memory.
        status_lines: kvpatch's, of both servers.
    """

    answers: list[Answer] = field(default_factory=list)
    counted: dict[str, dict[str, float]] = field(default_factory=dict)
    used: int = 0
    kept: int = 0
    second_used: int = 0
    idle: int = 0
    cycle: dict[str, Any] = field(default_factory=dict)
    elastic: bool = False
    status_lines: list[str] = field(default_factory=list)

    @property
    def returned(self) -> dict[str, float]:
        """What was counted while the first model's conversations returned."""
        return self.counted["first_returns"]

    @property
    def served(self) -> float:
        """Tokens of returning prompts that were not recomputed."""
        return self.returned["from_cache"] + self.returned["from_tier"]


@dataclass(frozen=True)
class Comparison:
    """Tokens of one run against another's, position by position.

    Attributes:
        equal, total: answer tokens at the same position of the same answer.
        answers_equal, answers: answers equal as a whole, prompt included.
        first_difference: the first difference in words; empty without one.
        logprob_difference: the largest, over the tokens that are equal.
    """

    equal: int = 0
    total: int = 0
    answers_equal: int = 0
    answers: int = 0
    first_difference: str = ""
    logprob_difference: float = 0.0


def compare(expected: Sequence[Answer], got: Sequence[Answer]) -> Comparison:
    """Compare ``got`` with plain vLLM's answers; what is missing counts as different."""
    seen = {(answer.conversation, answer.turn): answer for answer in got}
    equal, differences, logprobs = 0, [], [0.0]
    for right in expected:
        answer = seen.get((right.conversation, right.turn), Answer(0, 0))
        same = [a == b for a, b in zip(right.tokens, answer.tokens, strict=False)]
        equal += sum(same)
        pairs = zip(right.logprobs, answer.logprobs, same, strict=False)
        logprobs += [abs(a - b) for a, b, alike in pairs if alike]
        if (right.prompt, right.tokens) != (answer.prompt, answer.tokens):
            first = [*same, False].index(False) + 1
            what = f"token {first} of {len(right.tokens)} differs"
            if answer.tokens == right.tokens:
                what = "the prompts differ"
            elif not answer.turn:
                what = "no answer"
            differences.append(f"conversation {right.conversation}, turn {right.turn}: {what}")
    return Comparison(
        equal=equal,
        total=sum(len(right.tokens) for right in expected),
        answers_equal=len(expected) - len(differences),
        answers=len(expected),
        first_difference="".join(differences[:1]),
        logprob_difference=max(logprobs),
    )


def failures(comparison: Comparison, ours: Held, half: int) -> list[str]:
    """Return one sentence for each claim that did not hold; empty when all did.

    Args:
        comparison: with plain vLLM's answers.
        ours: the way with kvpatch.
        half: bytes of a static half of the device.
    """
    # On a busy machine requests may arrive so far apart that one model's peak is none.
    most = max(ours.used, ours.second_used)
    differ = (comparison.equal, comparison.answers_equal) != (comparison.total, comparison.answers)
    claims = (
        (comparison.total > 0, "Nothing was compared, because plain vLLM generated no tokens."),
        (
            not differ,
            f"The tokens differ from plain vLLM's ({comparison.equal} of {comparison.total} are "
            f"equal; {comparison.first_difference}), so the KV cache held wrong bytes.",
        ),
        (
            ours.returned["from_tier"] > 0,
            "No prompt token was loaded from the CPU tier, so the tier was not exercised.",
        ),
        (
            ours.elastic,
            'The status line "KV on elastic memory: yes" did not appear in a server\'s log.',
        ),
        (
            most > half,
            f"No model mapped more than {most >> 20} MiB at its peak, and half of the device is "
            f"{half >> 20} MiB, so nothing was lent.",
        ),
        (
            ours.kept < half,
            f"The first model still had {ours.kept >> 20} MiB mapped at the second's peak, and "
            f"the half of the device is {half >> 20} MiB, so it lent nothing.",
        ),
        (
            ours.idle < most,
            f"Mapped memory did not fall when both were idle ({ours.idle >> 20} MiB).",
        ),
    )
    return [sentence for held, sentence in claims if not held]
