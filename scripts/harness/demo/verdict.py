"""The comparison of the two runs, and whether the demo showed what it claims."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from harness.demo.conversations import Answer


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
    equal = total = answers_equal = 0
    difference, logprobs = "", 0.0
    seen = {(answer.conversation, answer.turn): answer for answer in got}
    for right in expected:
        total += len(right.tokens)
        answer = seen.get((right.conversation, right.turn))
        where = f"conversation {right.conversation}, turn {right.turn}"
        if answer is None:
            difference = difference or f"{where}: no answer"
            continue
        pairs = list(zip(right.tokens, answer.tokens, strict=False))
        same = [position for position, (a, b) in enumerate(pairs) if a == b]
        equal += len(same)
        if answer.prompt == right.prompt and answer.tokens == right.tokens:
            answers_equal += 1
        elif answer.tokens == right.tokens:
            difference = difference or f"{where}: the prompts differ"
        else:
            first = next(
                (at for at, (a, b) in enumerate(pairs) if a != b),
                min(len(right.tokens), len(answer.tokens)),
            )
            difference = difference or f"{where}: token {first + 1} of {len(right.tokens)} differs"
        for position in same:
            if position < min(len(right.logprobs), len(answer.logprobs)):
                apart = abs(right.logprobs[position] - answer.logprobs[position])
                logprobs = max(logprobs, apart)
    return Comparison(equal, total, answers_equal, len(expected), difference, logprobs)


@dataclass(frozen=True)
class Evidence:
    """The results of the two engines with kvpatch.

    Attributes:
        comparison: with plain vLLM's answers.
        from_tier: tokens of the returning prompts that were loaded.
        elastic: whether both KV caches were on elastic memory.
        half: bytes of a static half of the device.
        first_peak, second_peak: bytes that each model mapped at its own peak.
        kept: bytes that the first model still had mapped at the second's peak.
        idle: bytes that both had mapped when both were idle.
    """

    comparison: Comparison
    from_tier: int
    elastic: bool
    half: int
    first_peak: int
    second_peak: int
    kept: int
    idle: int


def failures(evidence: Evidence) -> list[str]:
    """Return one sentence for each claim that did not hold; empty when all did."""
    found = []
    comparison = evidence.comparison
    if not comparison.total:
        found.append("Nothing was compared, because plain vLLM generated no tokens.")
    elif comparison.equal != comparison.total or comparison.answers_equal != comparison.answers:
        found.append(
            f"The tokens differ from plain vLLM's ({comparison.equal} of {comparison.total} are "
            f"equal; {comparison.first_difference}), so the KV cache held wrong bytes."
        )
    if evidence.from_tier <= 0:
        found.append("No prompt token was loaded from the CPU tier, so the tier was not exercised.")
    if not evidence.elastic:
        found.append(
            'The status line "KV on elastic memory: yes" did not appear in a server\'s log.'
        )
    # On a busy machine requests may arrive so far apart that one model's peak is none.
    most = max(evidence.first_peak, evidence.second_peak)
    if most <= evidence.half:
        found.append(
            f"No model mapped more than {most >> 20} MiB at its peak, and half of the device is "
            f"{evidence.half >> 20} MiB, so nothing was lent."
        )
    if evidence.kept >= evidence.half:
        found.append(
            f"The first model still had {evidence.kept >> 20} MiB mapped at the second's peak, and "
            f"the half of the device is {evidence.half >> 20} MiB, so it lent nothing."
        )
    if evidence.idle >= most:
        found.append(f"Mapped memory did not fall when both were idle ({evidence.idle >> 20} MiB).")
    return found


def returning_ttft(answers: Sequence[Answer]) -> float:
    """Return the median seconds to the first token of returning conversations."""
    times = [answer.ttft for answer in answers if answer.returning]
    return median(times) if times else 0.0
